"""Engines and workers die; every job still ends once."""

import signal
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pipeline import Pipeline
from standin import StandInEngine

from headrace.engine.text_engine import TextCompletion
from headrace.ledger import AttemptRow, Begun, Ledger
from headrace.schemas import CancelBatch, ErrorCode, topics
from headrace.worker import worker as worker_module


def assert_each_once(line: Pipeline, ids: set, published: int | None = None) -> None:
    """Every job has one row and is on the results topic; a second copy there is the same answer."""
    assert line.rows().keys() == ids
    results = line.results(len(ids))
    assert results.keys() == ids
    for copies in results.values():
        assert all(copy == copies[0] for copy in copies)


def test_an_engine_that_dies_once_is_replaced_and_its_jobs_run_again(line: Pipeline, tmp_path: Path) -> None:
    worker = line.start_worker()
    ids = {line.submit(f"prompt {n}") for n in range(60)} | {line.submit(f"die-once:{tmp_path / 'died'}")}
    line.wait_terminal(61)
    assert_each_once(line, ids)
    worker.close()

    assert line.states() == {"succeeded": 61}
    assert len(worker.engines) == 2
    assert worker.engines[0].closed


def test_while_another_engine_is_opened_cancels_and_deadlines_hold_and_offsets_are_committed(
    line: Pipeline, tmp_path: Path
) -> None:
    opened, opening, let_go = [0], threading.Event(), threading.Event()

    def make() -> StandInEngine:
        opened[0] += 1
        if opened[0] > 1:
            opening.set()
            assert let_go.wait(300)
        return StandInEngine()

    worker = line.start_worker(make)
    id = line.submit(f"die-once:{tmp_path / 'died'}")
    line.flush()
    assert opening.wait(120)
    try:
        cancelled = line.submit("x", batch_id="b")
        expired = line.submit("x", deadline=(datetime.now(UTC) + timedelta(seconds=1)).isoformat())
        line.flush()
        line.control(CancelBatch(batch_id="b"))
        line.wait_for(lambda: line.states() == {"running": 1, "cancelled": 1, "expired": 1})
        assert line.results(2).keys() == {cancelled, expired}
        assert not worker.worker.status().ready
    finally:
        let_go.set()
    line.wait_terminal(3)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()
    assert line.rows() == {id: "succeeded", cancelled: "cancelled", expired: "expired"}
    assert opened == [2]


def test_a_cancel_ends_a_job_whose_attempt_was_written_while_its_engine_died(
    line: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning, opening, let_go = threading.Event(), threading.Event(), threading.Event()
    begin, engines = Ledger.begin, iter([StandInEngine()])

    def begin_late(ledger: Ledger, attempts: Sequence[AttemptRow]) -> Begun:
        if any(row.job.batch_id == "b" for row in attempts):
            beginning.set()
            assert opening.wait(300)
        return begin(ledger, attempts)

    def make() -> StandInEngine:
        if (first := next(engines, None)) is not None:
            return first
        opening.set()
        assert let_go.wait(300)
        return StandInEngine()

    monkeypatch.setattr(Ledger, "begin", begin_late)
    worker = line.start_worker(make)
    try:
        id = line.submit(f"until:{tmp_path / 'over'}")
        line.flush()
        line.wait_for(lambda: worker.engines and worker.engine.seen)
        begun = line.submit("x", batch_id="b")
        line.flush()
        line.wait_for(beginning.is_set)
        worker.engine.kill()
        line.wait_for(lambda: line.states() == {"running": 2})
        line.control(CancelBatch(batch_id="b"))
        line.wait_for(lambda: line.rows()[begun] == "cancelled")
        ended = line.query("SELECT ended_at IS NOT NULL, died FROM attempts WHERE id = %s", begun)
        assert ended == [(True, False)]
    finally:
        (tmp_path / "over").touch()
        opening.set()
        let_go.set()
    line.wait_terminal(2)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()
    assert line.rows() == {id: "succeeded", begun: "cancelled"}


def test_a_worker_that_stops_while_another_engine_is_opened_closes_it_when_it_comes(
    line: Pipeline, tmp_path: Path
) -> None:
    opening, let_go, late = threading.Event(), threading.Event(), StandInEngine()
    engines = iter([StandInEngine()])

    def make() -> StandInEngine:
        if (first := next(engines, None)) is not None:
            return first
        opening.set()
        assert let_go.wait(300)
        return late

    worker = line.start_worker(make)
    line.submit(f"die-once:{tmp_path / 'died'}")
    line.flush()
    assert opening.wait(120)
    worker.close()
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL") == [(0,)]
    let_go.set()
    line.wait_for(lambda: late.closed)


def test_a_job_that_kills_every_engine_fails_and_its_neighbours_do_not(line: Pipeline) -> None:
    worker = line.start_worker(lambda: StandInEngine(slots=8, latency_s=0.02))
    killer = line.submit("die", batch_id="b")
    ids = {line.submit(f"prompt {n}", batch_id="b") for n in range(40)}
    line.wait_terminal(41)
    (letter,) = line.dead_letters(1)
    results = line.results(41)
    worker.close()

    assert line.rows() == {killer: "failed", **dict.fromkeys(ids, "succeeded")}
    assert results[killer][0].error is not None
    assert results[killer][0].error.code == ErrorCode.ENGINE_FAILURE
    assert dict(letter.headers())[topics.DEAD_CODE] == b"engine_failure"
    assert len(worker.engines) < 15


def test_a_worker_killed_in_mid_batch_leaves_nothing_undone(line: Pipeline, tmp_path: Path) -> None:
    slow = {"latency_s": 0.2, "slots": 32}
    first = line.start_process(slow)
    ids = {line.submit(f"prompt {n}", batch_id="b") for n in range(380)}
    ids |= {line.submit(f"until:{tmp_path / 'killed'}", batch_id="b") for _ in range(20)}
    line.flush()
    line.wait_for(lambda: line.states()["succeeded"] >= 40 and line.states()["running"] >= 20)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (tmp_path / "killed").touch()

    second = line.start_process(slow)
    line.wait_terminal(400)
    line.wait_for(lambda: line.lag() == 0)
    second.send_signal(signal.SIGTERM)

    assert second.wait(120) == 0
    assert line.states() == {"succeeded": 400}
    assert_each_once(line, ids)
    assert line.query("SELECT max(attempt) FROM jobs") <= [(2,)]


def test_a_clean_stop_gives_back_what_runs_and_another_worker_finishes_it(
    line: Pipeline, tmp_path: Path
) -> None:
    # Whoever waited for the first worker's life to run out would wait for ever.
    first = line.start_worker(lambda: StandInEngine(slots=4), grace_s=0.5, alive_s=3600.0)
    ids = {line.submit(f"until:{tmp_path / 'stopped'}") for _ in range(6)} | {
        line.submit("quick") for _ in range(10)
    }
    line.flush()
    line.wait_for(lambda: first.engines and len(first.engine.seen) == 16)
    first.close()
    assert line.states()["succeeded"] < 16
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL OR died") == [(0,)]

    (tmp_path / "stopped").touch()
    second = line.start_worker()
    line.wait_terminal(16)
    second.close()

    assert line.states() == {"succeeded": 16}
    assert_each_once(line, ids)


def test_what_a_hung_engine_does_not_let_go_of_at_a_stop_is_told_and_done_by_the_next_worker(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hung(StandInEngine):
        def poll(self, timeout: float) -> list[TextCompletion]:
            time.sleep(timeout)
            return []

    monkeypatch.setattr(worker_module, "ABORT_S", 0.5)
    first = line.start_worker(Hung, grace_s=0.5, alive_s=2.0)
    ids = {line.submit("x") for _ in range(3)}
    line.flush()
    line.wait_for(lambda: first.engines and len(first.engine.seen) == 3)
    first.close()
    assert "the engine does not let go of 3 jobs" in caplog.text
    assert "does not take" not in caplog.text

    second = line.start_worker()
    line.wait_terminal(3)
    second.close()
    assert_each_once(line, ids)


def test_what_fits_in_the_grace_time_is_finished_by_a_stopping_worker(line: Pipeline) -> None:
    worker = line.start_worker(grace_s=60.0)
    ids = {line.submit("slow:1.5") for _ in range(5)}
    line.flush()
    line.wait_for(lambda: worker.engines and len(worker.engine.seen) == 5)
    worker.close()

    assert line.states() == {"succeeded": 5}
    assert line.lag() == 0
    assert_each_once(line, ids)
