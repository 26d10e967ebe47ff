"""Watching a batch: until it is complete, or until somebody has seen enough."""

import json
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from pipeline import Pipeline, pipeline, recording
from typer.testing import CliRunner
from waiting import eventually

from headrace.cli import app, context
from headrace.cli import follow as module
from headrace.cli.follow import follow
from headrace.cli.promise import Promise
from headrace.client import Client
from headrace.client.announced import Announced
from headrace.ledger import BatchProgress, BatchState


class Growing:
    """A ledger whose batch of 8 ends two more jobs at each look; unknown at the first."""

    def __init__(self) -> None:
        self.looks = 0

    def batch(self, tenant: str, batch_id: str) -> BatchProgress | None:
        self.looks += 1
        done = 2 * (self.looks - 1)
        if self.looks == 1:
            return None
        return BatchProgress(
            tenant=tenant, batch_id=batch_id, state=BatchState.COMPLETE if done == 8 else BatchState.CLOSED,
            expected=8, submitted=8, queued=0, running=8 - done, succeeded=done - 1, failed=0, cancelled=1, expired=0,
            rejected=0, prompt_tokens=0, cached_tokens=0, completion_tokens=10 * done, opened_at=None, closed_at=None,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)


def test_it_ends_with_the_complete_batch() -> None:
    batch = follow(Growing(), "default", "b", Event(), quiet=True)  # type: ignore[arg-type]
    assert batch is not None
    assert batch.complete


def test_without_a_terminal_it_prints_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    follow(Growing(), "default", "b", Event(), promise=Promise(8))  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("b: 2/8 ended, 1 done, 0 failed, 1 cancelled, 6 running, 0 queued")
    assert lines[-1].startswith("b: 8/8 ended")
    assert "\x1b" not in err


class Stale(Growing):
    """A ledger that takes three looks to learn that a batch complete with one record was sent again with eight."""

    def batch(self, tenant: str, batch_id: str) -> BatchProgress | None:
        self.looks += 1
        grown = self.looks > 3
        done = 8 if grown else 1
        return BatchProgress(
            tenant=tenant, batch_id=batch_id, state=BatchState.COMPLETE, expected=done, submitted=done, queued=0,
            running=0, succeeded=done, failed=0, cancelled=0, expired=0, rejected=0, prompt_tokens=0, cached_tokens=0,
            completion_tokens=0, opened_at=None, closed_at=None,
        )  # fmt: skip


def test_a_batch_that_was_complete_before_more_was_sent_is_waited_for() -> None:
    batch = follow(Stale(), "default", "b", Event(), promise=Promise(8), quiet=True)  # type: ignore[arg-type]
    assert batch is not None
    assert batch.succeeded == 8


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    follow(Growing(), "default", "b", Event(), quiet=True)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_a_stop_returns_the_batch_as_it_is() -> None:
    stop, ledger = Event(), Growing()

    def after_two_looks() -> None:
        if ledger.looks == 2:
            stop.set()

    batch = follow(ledger, "default", "b", stop, quiet=True, meanwhile=after_two_looks)  # type: ignore[arg-type]
    assert batch is not None
    assert not batch.complete


def test_what_goes_wrong_meanwhile_ends_it() -> None:
    def fail() -> None:
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError, match="died"):
        follow(Growing(), "default", "b", Event(), quiet=True, meanwhile=fail)  # type: ignore[arg-type]


def point_at(line: Pipeline, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' settings."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", line.bootstrap)
    monkeypatch.setenv("DATABASE_URL", line.database_url)
    monkeypatch.setenv("HEADRACE_TOPIC_PREFIX", line.topics.prefix)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(state_dir))


@pytest.mark.timeout(600)
def test_results_wait_for_what_was_sent_again_before_anybody_has_read_it(
    kafka: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"custom_id": str(number), "prompt": f"number {number}"} for number in range(4)]
    asked, ask = Event(), context.announced

    def announced(*arguments: object) -> int:
        try:
            return ask(*arguments)  # type: ignore[arg-type]
        finally:
            asked.set()

    monkeypatch.setattr(context, "announced", announced)
    with pipeline(kafka, database_url, partitions=2) as made, Client(kafka, made.topics) as client:
        point_at(made, tmp_path, monkeypatch)
        worker = made.start_worker()
        with recording(made):
            first = client.submit(lines[:2], idempotency_key="nightly")

            def complete() -> bool:
                batch = made.ledger.batch("default", first.batch_id)
                return batch is not None and batch.complete

            eventually(complete)
        worker.close()
        client.submit(lines, idempotency_key="nightly")
        ended = Event()

        def go_on() -> None:
            asked.wait(120)
            made.start_worker()
            with recording(made):
                ended.wait(120)

        others = Thread(target=go_on)
        others.start()
        try:
            result = CliRunner().invoke(app, ["results", first.batch_id, "--follow"])
        finally:
            asked.set()
            ended.set()
            others.join(120)
    assert sorted(json.loads(line)["custom_id"] for line in result.stdout.splitlines()) == [
        "0",
        "1",
        "2",
        "3",
    ]


BAD, MENDED = '{"custom_id": "a", "prompt": ', '{"custom_id": "a", "prompt": "mended"}'


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["submit", "status"])
def test_a_file_that_was_mended_is_followed_to_its_end_though_the_table_shows_it_complete_as_it_was(
    kafka: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    good = '{"custom_id": "b", "prompt": "good"}'
    asked, ended, ask = [], Event(), context.announced

    def announced(*arguments: Any) -> Announced:
        told = ask(*arguments)
        asked.append(told.expected)
        return told

    monkeypatch.setattr(context, "announced", announced)
    with pipeline(kafka, database_url, partitions=2) as made, Client(kafka, made.topics) as client:
        point_at(made, tmp_path, monkeypatch)
        worker = made.start_worker()
        with recording(made):
            batch_id = client.submit([BAD, good], idempotency_key="k").batch_id

            def complete() -> bool:
                batch = made.ledger.batch("default", batch_id)
                return batch is not None and batch.complete

            eventually(complete)
        worker.close()

        def go_on() -> None:
            eventually(lambda: len(asked) > 2 or ended.is_set())  # the recorder lags for so long
            made.start_worker()
            with recording(made):
                ended.wait(120)

        others = Thread(target=go_on)
        others.start()
        try:
            if command == "submit":
                file = tmp_path / "mended.jsonl"
                file.write_text(f"{MENDED}\n{good}\n")
                arguments = ["submit", str(file), "--idempotency-key", "k", "--follow", "--json"]
            else:
                client.submit([MENDED, good], idempotency_key="k")
                arguments = ["status", batch_id, "--follow", "--json"]
            result = CliRunner().invoke(app, arguments)
        finally:
            ended.set()
            others.join(120)
    told = json.loads(result.stdout)
    batch = told.get("batch", told)
    assert (batch["succeeded"], batch["rejected"], batch["state"]) == (2, 0, "complete"), told
    assert asked[:3] == [2, 2, 2]
