"""Watching a batch: until it is complete, or until somebody has seen enough."""

import json
from pathlib import Path
from threading import Event, Thread

import pytest
from pipeline import pipeline, recording
from typer.testing import CliRunner
from waiting import eventually

from headrace.cli import app, context
from headrace.cli import follow as module
from headrace.cli.follow import Promise, follow
from headrace.client import Client
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


def test_what_was_announced_is_asked_each_time_the_batch_is_complete_and_not_before() -> None:
    ledger, announced = Stale(), [0, 8]
    promise = Promise(announced=announced.pop)
    batch = follow(ledger, "default", "b", Event(), promise=promise, quiet=True)  # type: ignore[arg-type]
    assert (ledger.looks, announced) == (5, [])
    assert batch is not None
    assert batch.succeeded == 8


def test_what_is_recorded_just_before_the_question_is_waited_for() -> None:
    ledger = Stale()

    def announced() -> int:
        ledger.looks = 3  # and nothing is left unread
        return 0

    batch = follow(ledger, "default", "b", Event(), promise=Promise(announced=announced), quiet=True)  # type: ignore[arg-type]
    assert batch is not None
    assert batch.succeeded == 8


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
        monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka)
        monkeypatch.setenv("DATABASE_URL", database_url)
        monkeypatch.setenv("HEADRACE_TOPIC_PREFIX", made.topics.prefix)
        monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
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
