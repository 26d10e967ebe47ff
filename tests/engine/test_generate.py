"""Files through an engine: every line once, flat memory, valid after a stop or a kill, taken up where it was left."""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from small_tokenizers import small

from headrace.engine import generate as generate_module
from headrace.engine.errors import EngineDead
from headrace.engine.generate import ParsedLine, Progress, generate, plain_result
from headrace.engine.request import Request
from headrace.engine.result_file import LineSet, ResultFile
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import RequestError, TextCompletion, TextRequest

TOKENIZER = small("byte_level")
Record = dict[str, Any]


def parse(data: bytes, number: int) -> ParsedLine:
    try:
        line = json.loads(data)
        return ParsedLine(TextRequest(id="same", prompt=line["prompt"]), {"custom_id": line.get("id")})
    except json.JSONDecodeError:
        return ParsedLine(RequestError("invalid_json", "the line is not JSON"))
    except KeyError as error:
        return ParsedLine(
            RequestError("missing_field", f"{error} is missing", "prompt"), {"custom_id": line.get("id")}
        )


def echo(request: Request) -> list[int]:
    """Answers with the prompt, and takes longer for some than for others."""
    return list(request.prompt) * random.Random(request.id).randint(1, 4)


def scripted(**options: Any) -> tuple[LocalTextEngine, ScriptedEngine]:
    inner = ScriptedEngine(echo, len(TOKENIZER.pieces()), **options)
    return LocalTextEngine(inner, TOKENIZER), inner


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(count: int, *more: bytes) -> Path:
        path = tmp_path / "in.jsonl"
        whole = [
            json.dumps({"id": f"job {n}", "prompt": f"wheel {n} 🙂"}).encode() for n in range(1, count + 1)
        ]
        path.write_bytes(b"\n".join([*whole, *more]) + b"\n")
        return path

    return write


def results(path: Path) -> dict[int, Record]:
    """Results by line; each line must have one only, and the file must be whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    records = [json.loads(line) for line in data.splitlines()]
    by_line = {record["line"]: record for record in records}
    assert len(by_line) == len(records)
    return by_line


def test_every_line_gets_its_own_result_as_it_ends(lines: Callable[..., Path], tmp_path: Path) -> None:
    engine, inner = scripted()
    out = tmp_path / "out.jsonl"
    progress = generate(lines(300), out, engine, parse, max_in_flight=16)
    by_line = results(out)
    assert sorted(by_line) == list(range(1, 301))
    assert list(by_line) != sorted(by_line), "the fast ones are not held up by the slow ones"
    for n, record in by_line.items():
        assert record["custom_id"] == f"job {n}"
        assert record["choices"][0]["text"].startswith(f"wheel {n} 🙂")
        assert (record["state"], record["error"]) == ("succeeded", None)
    assert inner.most_running == 16
    assert (progress.succeeded, progress.failed, progress.in_flight, progress.stopped) == (300, 0, 0, False)
    assert progress.bytes_read == progress.bytes_total
    assert progress.completion_tokens == sum(r["usage"]["completion_tokens"] for r in by_line.values())


def test_a_result_has_the_documented_shape(lines: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    generate(lines(1), out, scripted()[0], parse)
    record = results(out)[1]
    tokens = record["usage"]["prompt_tokens"]
    assert record == {
        "line": 1,
        "input": record["input"],
        "custom_id": "job 1",
        "state": "succeeded",
        "choices": [
            {"index": 0, "text": record["choices"][0]["text"], "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": tokens,
            "cached_tokens": 0,
            "completion_tokens": record["usage"]["completion_tokens"],
        },
        "error": None,
    }


def test_bad_lines_end_as_errors_with_their_line_and_field(
    lines: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "MAX_LINE_BYTES", 1000)
    out = tmp_path / "out.jsonl"
    source = lines(
        2,
        b"{not json",
        b"",
        b"  ",
        b'{"id": "no prompt"}',
        b'{"prompt": ""}',
        b"x" * 5000,
        b'{"prompt": "last"}',
    )
    progress = generate(source, out, scripted()[0], parse)
    by_line = results(out)
    errors = {n: (r["error"]["code"], r["error"]["param"]) for n, r in by_line.items() if r["error"]}
    assert errors == {
        3: ("invalid_json", None),
        6: ("missing_field", "prompt"),
        7: ("invalid_value", "prompt"),
        8: ("message_too_large", None),
    }
    assert by_line[6]["custom_id"] == "no prompt"
    assert by_line[6]["state"] == "failed"
    assert sorted(by_line) == [1, 2, 3, 6, 7, 8, 9], "empty lines have no result"
    assert (progress.succeeded, progress.failed) == (3, 4)


def test_a_line_that_a_defect_of_ours_meets_fails_alone(
    lines: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "what nobody may read"

    def parse_but(data: bytes, number: int) -> ParsedLine:
        if b"unreadable" in data:
            raise RecursionError(secret)
        return parse(data, number)

    def encode_but(job: Any, completion: TextCompletion) -> dict[str, Any]:
        if job == {"custom_id": "unwritable"} and completion.error is None:
            raise RecursionError(secret)
        return plain_result(job, completion)

    source = lines(3, b'{"id": "unreadable", "prompt": "a"}', b'{"id": "unwritable", "prompt": "a"}')
    caplog.set_level("INFO")
    engine, _ = scripted()
    progress = generate(source, tmp_path / "out.jsonl", engine, parse_but, encode=encode_but)
    found = results(tmp_path / "out.jsonl")
    assert (progress.succeeded, progress.failed) == (3, 2)
    assert [found[line]["state"] for line in sorted(found)] == ["succeeded"] * 3 + ["failed"] * 2
    assert found[4]["error"]["message"] == "reading the line failed with RecursionError"
    assert found[5]["error"]["message"] == "writing down the answer failed with RecursionError"
    assert found[5]["custom_id"] == "unwritable"
    assert secret not in caplog.text


def parse_deadlines(data: bytes, number: int) -> ParsedLine:
    """As ``parse``, with the line's ``deadline``."""
    parsed = parse(data, number)
    assert isinstance(parsed.request, TextRequest)
    request = dataclasses.replace(parsed.request, deadline=json.loads(data).get("deadline"))
    return dataclasses.replace(parsed, request=request)


def test_a_line_whose_deadline_has_passed_is_not_run(lines: Callable[..., Path], tmp_path: Path) -> None:
    out, engine = tmp_path / "out.jsonl", scripted()[0]
    source = lines(1, b'{"prompt": "late", "deadline": 1e9}', b'{"prompt": "in time", "deadline": 1e11}')
    progress = generate(source, out, engine, parse_deadlines)
    assert (progress.succeeded, progress.failed, progress.expired, progress.done) == (2, 0, 1, 3)
    found = results(out)
    assert [found[line]["state"] for line in (1, 2, 3)] == ["succeeded", "expired", "succeeded"]
    assert found[2]["error"]["code"] == "deadline_exceeded"
    assert found[2]["choices"] == []
    assert generate(source, out, engine, parse_deadlines, resume=True).skipped == 3


def test_a_line_that_runs_is_stopped_at_its_deadline(
    lines: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, (engine, inner), now = tmp_path / "out.jsonl", scripted(), [1e9]
    monkeypatch.setattr(generate_module, "time", SimpleNamespace(time=lambda: now[0]))
    add_many = engine.add_many

    def begin_and_wait(requests: Sequence[TextRequest]) -> None:
        add_many(requests)
        now[0] = 3e9

    monkeypatch.setattr(engine, "add_many", begin_and_wait)
    source = lines(1, b'{"prompt": "too long", "deadline": 2e9}', b'{"prompt": "in time", "deadline": 4e9}')
    progress = generate(source, out, engine, parse_deadlines)
    assert (progress.succeeded, progress.expired) == (2, 1)
    found = results(out)
    assert [found[line]["state"] for line in (1, 2, 3)] == ["succeeded", "expired", "succeeded"]
    assert inner.stats().running == 0


def test_a_file_of_bad_lines_alone_ends(lines: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    progress = generate(lines(0, *[b"bad"] * 100), out, scripted()[0], parse, max_in_flight=7)
    assert progress.failed == 100


def test_an_empty_file_gives_an_empty_one(lines: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(lines(0), out, scripted()[0], parse).done == 0
    assert out.read_bytes() == b""


def test_progress_is_told_after_each_batch_of_results(lines: Callable[..., Path], tmp_path: Path) -> None:
    seen: list[int] = []
    generate(lines(50), tmp_path / "out", scripted()[0], parse, on_progress=lambda p: seen.append(p.done))
    assert seen == sorted(set(seen))
    assert seen[-1] == 50


def test_a_stopped_run_leaves_whole_results_and_can_be_taken_up(
    lines: Callable[..., Path], tmp_path: Path
) -> None:
    source, out, stop = lines(200), tmp_path / "out.jsonl", threading.Event()

    def stop_at_fifty(progress: Progress) -> None:
        if progress.done >= 50:
            stop.set()

    engine, inner = scripted()
    first = generate(source, out, engine, parse, max_in_flight=20, on_progress=stop_at_fifty, stop=stop)
    kept = results(out)
    assert first.stopped
    assert first.in_flight == 0
    assert 50 <= len(kept) == first.done < 100
    assert inner.stats().running == 0, "what ran was aborted"
    assert all(r["choices"][0]["finish_reason"] != "abort" for r in kept.values())

    second = generate(source, out, engine, parse, resume=True)
    assert sorted(results(out)) == list(range(1, 201))
    assert (second.skipped, second.done) == (len(kept), 200 - len(kept))
    third = generate(source, out, engine, parse, resume=True)
    assert (third.skipped, third.done) == (200, 0)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_is_cut_off_and_run_again(
    lines: Callable[..., Path], tmp_path: Path, cut: int
) -> None:
    source, out = lines(5), tmp_path / "out.jsonl"
    generate(source, out, scripted()[0], parse)
    whole = out.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    out.write_bytes(whole[: len(whole) - min(cut * 5, last)])
    generate(source, out, scripted()[0], parse, resume=True)
    assert sorted(results(out)) == [1, 2, 3, 4, 5]
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_dead_engine_leaves_what_was_done(lines: Callable[..., Path], tmp_path: Path) -> None:
    source, out = lines(100), tmp_path / "out.jsonl"
    engine, inner = scripted()

    def die(progress: Progress) -> None:
        inner.dead = progress.done >= 30

    with pytest.raises(EngineDead):
        generate(source, out, engine, parse, max_in_flight=8, on_progress=die)
    assert len(results(out)) >= 30
    generate(source, out, scripted()[0], parse, resume=True)
    assert len(results(out)) == 100


@pytest.mark.parametrize(
    "contents",
    [
        b"precious",
        b"precious\n",
        b'{"prompt": "an input file"}\n',
        b'{"line": 0}\n',
        b'{"line": 1000000}\n',
        b"[1]\n",
    ],
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_file_of_something_else_is_never_touched(
    lines: Callable[..., Path], tmp_path: Path, contents: bytes, resume: bool
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(contents)
    with pytest.raises(FileExistsError, match=r"out\.jsonl"):
        generate(lines(3), out, scripted()[0], parse, resume=resume)
    assert out.read_bytes() == contents


def test_results_are_not_overwritten_unless_resumed(lines: Callable[..., Path], tmp_path: Path) -> None:
    source, out = lines(3), tmp_path / "out.jsonl"
    generate(source, out, scripted()[0], parse)
    before = out.read_bytes()
    with pytest.raises(FileExistsError, match="resume"):
        generate(source, out, scripted()[0], parse)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "changed",
    [b'{"prompt": "another"}\n{"prompt": "b"}\n', b'{"prompt": "b"}\n{"prompt": "a"}\n', b"\n" * 99],
)
def test_results_of_another_input_are_not_gone_on_with(tmp_path: Path, changed: bytes) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    generate(source, out, scripted()[0], parse)
    before = out.read_bytes()
    source.write_bytes(changed)
    with pytest.raises(FileExistsError, match="another input"):
        generate(source, out, scripted()[0], parse, resume=True)
    assert out.read_bytes() == before


def test_an_input_that_has_grown_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "MAX_LINE_BYTES", 50)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = b"x" * 170 + b'\n{"prompt": "a"}'
    source.write_bytes(lines)
    generate(source, out, scripted()[0], parse)
    source.write_bytes(lines + b'\n{"prompt": "b"}\n')
    progress = generate(source, out, scripted()[0], parse, resume=True)
    assert (progress.skipped, progress.done) == (2, 1)


def test_results_that_do_not_tell_their_input_are_gone_on_with(
    lines: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(b'{"line": 2, "state": "succeeded"}\n')
    progress = generate(lines(3), out, scripted()[0], parse, resume=True)
    assert (progress.skipped, progress.done) == (1, 2)


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    with (
        ResultFile(tmp_path / "out", resume=False, max_line=1),
        pytest.raises(BlockingIOError, match="another process"),
    ):
        ResultFile(tmp_path / "out", resume=True, max_line=1)


def test_half_a_surrogate_pair_in_an_id_breaks_no_line(lines: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    generate(lines(0, b'{"id": "\\ud83d", "prompt": "go"}'), out, scripted()[0], parse)
    assert results(out)[1]["custom_id"] == "\ud83d"


def test_memory_does_not_grow_with_the_file(lines: Callable[..., Path], tmp_path: Path) -> None:
    def peak(count: int) -> int:
        source = lines(count)
        engine, inner = scripted(burst=1000)
        inner.remember = False
        tracemalloc.start()
        generate(source, tmp_path / f"out {count}", engine, parse, max_in_flight=32)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(100)  # what is loaded once
    assert peak(6000) < peak(600) + 200_000


def test_a_set_of_lines_costs_a_bit_each() -> None:
    numbers = LineSet()
    for line in (1, 7, 8, 8, 1_000_000):
        numbers.add(line)
    assert [line in numbers for line in (0, 1, 2, 7, 8, 9, 1_000_000, 10**12)] == [
        False, True, False, True, True, False, True, False,
    ]  # fmt: skip
    assert len(numbers) == 4


SLOW_RUN = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
sys.path[:0] = sys.argv[3:]
import test_generate as t

engine, inner = t.scripted()
def unhurried(timeout, step=inner.poll):
    time.sleep(0.05)
    return step(timeout)
inner.poll = unhurried
t.generate(Path(sys.argv[1]), Path(sys.argv[2]), engine, t.parse, max_in_flight=8)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_a_file_that_can_be_taken_up(
    lines: Callable[..., Path], tmp_path: Path, sent: signal.Signals
) -> None:
    source, out = lines(2000), tmp_path / "out.jsonl"
    here = Path(__file__).parent
    command = [sys.executable, "-c", SLOW_RUN, source, out, here, here.parent / "harness", here.parent.parent]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not out.exists() or out.read_bytes().count(b"\n") < 40:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        process.send_signal(sent)
        process.wait(120)
    kept = out.read_bytes().count(b"\n")
    assert 40 <= kept < 2000
    progress = generate(source, out, scripted()[0], parse, resume=True)
    assert sorted(results(out)) == list(range(1, 2001))
    assert (progress.skipped, progress.done) == (kept, 2000 - kept)
