"""`headrace local run`: where the results of a file go, and what ends it while it sends."""

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
from typer.testing import CliRunner

from headrace.cli import app, local
from headrace.cli.exits import Exit
from headrace.client import Submission
from headrace.settings import child_environment


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """A stack that is up and takes what it is sent, as batches called first and second; results are their names."""
    sent: list[list[bytes]] = []
    batches = iter(("first", "second"))

    def send(settings: object, lines: Iterable[bytes], tier: str) -> Submission:
        sent.append(list(lines))
        return Submission("default", next(batches), [], 1, [])

    def write(ledger: object, tenant: str, batch_id: str, lines: local.Lines, **_: object) -> int:
        lines._out.write(batch_id.encode())
        return 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "_running", lambda settings, stop, quiet: nullcontext((settings, None)))
    monkeypatch.setattr(local, "send", send)
    monkeypatch.setattr(local.context, "open_ledger", lambda settings: nullcontext())
    monkeypatch.setattr(local, "follow", lambda *_, **__: None)
    monkeypatch.setattr(local, "write_results", write)
    return sent


@pytest.mark.usefixtures("sent")
def test_two_runs_of_one_file_keep_both_results(tmp_path: Path) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "hello"}\n')
    for batch_id in ("first", "second"):
        result = CliRunner().invoke(app, ["local", "run", "prompts.jsonl"])
        assert result.exit_code == 0, result.output
        assert f"1 result in prompts.{batch_id}.results.jsonl" in result.output
    found = {file.name: file.read_text() for file in tmp_path.glob("*.results.jsonl")}
    assert found == {"prompts.first.results.jsonl": "first", "prompts.second.results.jsonl": "second"}


def test_prompts_come_from_stdin_too(sent: list[list[bytes]]) -> None:
    result = CliRunner().invoke(app, ["local", "run", "-"], input='{"prompt": "one"}\n{"prompt": "two"}\n')
    assert result.exit_code == 0, result.output
    assert sent == [[b'{"prompt": "one"}\n', b'{"prompt": "two"}\n']]
    assert Path("stdin.first.results.jsonl").read_text() == "first"


@pytest.mark.parametrize(
    ("option", "exit_code", "message"),
    [
        (("--tier", "hurry"), Exit.USAGE, "Tiers are interactive, standard, bulk."),
        (("--output", "nowhere/out.jsonl"), Exit.NOT_FOUND, "There is no directory nowhere."),
        (("--output", "."), Exit.USAGE, ". is a directory."),
    ],
)
def test_what_cannot_end_well_is_told_before_anything_is_sent(
    option: tuple[str, str], exit_code: Exit, message: str, sent: list[list[bytes]]
) -> None:
    result = CliRunner().invoke(app, ["local", "run", "-", *option], input='{"prompt": "one"}\n')
    assert result.exit_code == exit_code, result.output
    assert message in result.output
    assert not sent


@pytest.mark.parametrize("output", ["prompts.jsonl", "below/../prompts.jsonl", "link.jsonl", "hard.jsonl"])
def test_results_are_never_written_over_the_prompts(output: str, sent: list[list[bytes]]) -> None:
    prompts = Path("prompts.jsonl")
    prompts.write_text('{"prompt": "hello"}\n')
    Path("below").mkdir()
    Path("link.jsonl").symlink_to("prompts.jsonl")
    Path("hard.jsonl").hardlink_to("prompts.jsonl")
    result = CliRunner().invoke(app, ["local", "run", "prompts.jsonl", "-o", output])
    assert result.exit_code == Exit.REFUSED, result.output
    assert f"{output} is already there: it is the file of the prompts." in result.output
    assert not sent
    assert prompts.read_text() == '{"prompt": "hello"}\n'


@pytest.mark.parametrize("output", ["prompts.jsonl", "link.jsonl"])
def test_results_are_never_written_over_prompts_that_come_from_stdin(output: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    (tmp_path / "link.jsonl").symlink_to(prompts)
    command = [sys.executable, "-P", "-m", "headrace", "local", "run", "-", "--output", output]
    environment = child_environment(HEADRACE_STATE_DIR=str(tmp_path / "state"))
    with prompts.open() as stdin:
        ended = subprocess.run(
            command, stdin=stdin, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
        )
    assert ended.returncode == Exit.REFUSED, ended.stderr
    assert f"{output} is already there: it is the file of the prompts." in ended.stderr
    assert prompts.read_text() == '{"prompt": "hello"}\n'


def test_results_of_an_earlier_run_are_written_over(sent: list[list[bytes]]) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "hello"}\n')
    Path("out.jsonl").write_text("earlier results")
    result = CliRunner().invoke(app, ["local", "run", "prompts.jsonl", "-o", "out.jsonl"])
    assert result.exit_code == 0, result.output
    assert len(sent) == 1
    assert Path("out.jsonl").read_text() == "first"


RUNS_ON = (
    "Batch first runs on: `headrace results first --follow --format jsonl --output out.jsonl` goes on with it,"
    " `headrace cancel first --batch` ends it."
)
WAITS = "What has not ended of batch first waits in Kafka for a worker"
GONE = "What has not ended of batch first is gone with its stack: run the file again."


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize(
    ("own_stack", "kafka", "over", "said"),
    [
        (False, "", False, RUNS_ON),
        (True, "127.0.0.1:1", False, WAITS),
        (True, "", False, GONE),
        (True, "", True, None),
    ],
    ids=["the stack stays", "Kafka stays", "all stops", "the batch is over"],
)
def test_a_run_that_is_stopped_while_it_follows_says_what_becomes_of_its_batch(
    own_stack: bool, kafka: str, over: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = SimpleNamespace(supervise=None) if own_stack else None

    def follow(*_: object, **__: object) -> SimpleNamespace:
        signal.raise_signal(signal.SIGINT)
        return SimpleNamespace(over=over)

    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setattr(local, "_running", lambda settings, stop, quiet: nullcontext((settings, stack)))
    monkeypatch.setattr(local, "follow", follow)
    monkeypatch.setattr(local, "show_batch", lambda batch: None)
    result = CliRunner().invoke(app, ["local", "run", "-", "-o", "out.jsonl"], input='{"prompt": "one"}\n')
    assert result.exit_code == Exit.INTERRUPTED, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith(said or "1 result in out.jsonl.")
    assert Path("out.jsonl").read_text() == "first"


class Interrupted:
    """A client whose user has seen enough when Kafka has three jobs."""

    confirmed = 3

    def __init__(self, ending: signal.Signals) -> None:
        self._ending = ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, lines: object, tier: str, **_: object) -> None:
        signal.raise_signal(self._ending)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_stopped_while_it_reads_and_sends(
    ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_running", lambda settings, stop, quiet: nullcontext((settings, None)))
    monkeypatch.setattr(local.context, "open_client", lambda settings: Interrupted(ending))
    result = CliRunner().invoke(app, ["local", "run", "-"], input='{"prompt": "one"}\n')
    assert result.exit_code == Exit.INTERRUPTED, result.output
    assert "Kafka had confirmed 3 jobs" in result.output
