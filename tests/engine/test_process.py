"""The engine in a child process: the same answers, and an honest word when it dies."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest
import tiny_model

from headrace.engine import Engine, EngineConfig, EngineProcess, Request, SamplingParams
from headrace.engine.errors import EngineDead, InvalidRequest, ModelNotFound
from headrace.engine.process import _loop

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = tiny_model.write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    return EngineConfig(
        model=model, weights="random", dtype="float32", device="cpu", kv_tokens=8192, max_slots=8
    )


@pytest.fixture
def engine(config):
    engine = EngineProcess(config)
    yield engine
    engine.close()


def collect(engine, count):
    done = {}
    deadline = time.monotonic() + 120
    while len(done) < count and time.monotonic() < deadline:
        done |= {completion.id: completion for completion in engine.poll(1.0).completions}
    return done


def test_it_answers_as_the_engine_in_this_process_does(config, engine):
    requests = [Request(f"r{i}", [3 + i, 4, 5], PARAMS) for i in range(5)]
    here = Engine(config)
    here.add_many(requests)
    reference = {}
    while here.has_work:
        reference |= {c.id: c.token_ids for c in here.step().completions}
    engine.add_many(requests)
    assert {c.id: c.token_ids for c in collect(engine, 5).values()} == reference
    assert engine.info == here.info


def test_the_child_ends_without_a_word(config, capfd):
    """Bindings of libraries look for what is left at the end, and print it."""
    engine = EngineProcess(config)
    engine.add_many([Request("a", [3], PARAMS)])
    assert set(collect(engine, 1)) == {"a"}
    engine.close()
    assert capfd.readouterr().err == ""


def test_a_bad_request_is_refused_in_the_callers_process_and_the_child_lives_on(engine):
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add_many([Request("a", [], PARAMS)])
    engine.add_many([Request("a", [3], PARAMS)])
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.add_many([Request("a", [3], PARAMS)])
    assert set(collect(engine, 1)) == {"a"}


def test_requests_that_could_not_be_sent_may_come_again(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_send", lambda *message: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.add_many([Request("a", [3], PARAMS)])
    engine.add_many([Request("a", [3], PARAMS)])
    assert set(collect(engine, 1)) == {"a"}


def test_abort_ends_a_request_early(engine):
    engine.add_many([Request("a", [3], SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True))])
    engine.abort("a")
    assert len(collect(engine, 1)["a"].token_ids) < 4000


class Commands:
    """The child's end of a pipe, on which each command comes when its time has come."""

    def __init__(self, *commands):
        self._commands = list(commands)

    def poll(self, timeout):
        return self._commands[0][0]()

    def recv(self):
        _, command, *args = self._commands.pop(0)
        return command, args

    def send(self, message):
        """Nobody reads it."""


@pytest.mark.parametrize(("prompt_len", "after"), [(400, 3), (20, 30)], ids=["prefill", "decode"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_further_step_computes_a_request_that_is_aborted(config, prompt_len, after, lag):
    engine = Engine(replace(config, max_batched_tokens=16, lag=lag))
    request = Request("a", [3] * prompt_len, replace(PARAMS, max_tokens=1000))
    _loop(
        engine,
        Commands(
            (lambda: True, "add_many", [request]),
            (lambda: engine.stats().steps == after, "abort", "a"),
            (lambda: not engine.has_work, "close"),
        ),
    )
    assert engine.stats().steps == after
    engine.close()


def test_a_killed_child_is_reported_and_close_still_works(engine):
    engine.add_many([Request("a", [3], PARAMS)])
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="exit code -9"):
        collect(engine, count=2)
    with pytest.raises(EngineDead):
        engine.poll(0.1)
    engine.close()
    engine.close()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_tells_a_whole_group_to_end_is_left_to_the_parent(engine, ending):
    os.kill(engine.pid, ending)
    engine.add_many([Request("a", [3], PARAMS)])
    assert set(collect(engine, 1)) == {"a"}


@pytest.mark.parametrize("loaded", [True, False])
def test_a_parent_that_ends_without_closing_the_engine_does_not_wait_for_it(config, tmp_path, loaded):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from headrace.engine import EngineConfig, EngineProcess
        if __name__ == "__main__":
            if not {loaded}:
                EngineProcess._wait_until_ready = lambda self: sys.exit()
            kept = EngineProcess(EngineConfig(model={config.model!r}, weights="random", device="cpu", kv_tokens=512))
        """)
    )
    assert subprocess.run([sys.executable, script], timeout=120).returncode == 0


def test_an_error_in_the_child_is_printed_there_and_reported_here(config, capfd):
    engine = EngineProcess(config)
    engine._pipe.send(
        ("no_such_command", ())
    )  # raises in the child's loop, as a step does on a broken device
    with pytest.raises(EngineDead, match="exit code 1"):
        collect(engine, count=1)
    engine.close()
    assert "no_such_command" in capfd.readouterr().err


def test_what_cannot_be_built_raises_here(tmp_path):
    with pytest.raises(ModelNotFound):
        EngineProcess(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))


def test_the_child_ends_when_its_parent_is_killed(config, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from headrace.engine import EngineConfig, EngineProcess
        if __name__ == "__main__":
            engine = EngineProcess(EngineConfig(model={config.model!r}, weights="random", device="cpu", kv_tokens=512))
            print(engine.pid, flush=True)
            time.sleep(600)
        """)
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
