"""A cancelled or expired job ends with a record that says so, wherever it is when that happens."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import clock
import pytest
from clock import Clock
from pipeline import Pipeline
from standin import StandInEngine

from headrace.schemas import BatchOpened, CancelBatch, CancelJob, ErrorCode, uuid7
from headrace.worker import worker as worker_module

FOR_EVER = "slow:1000000"


@pytest.fixture
def worker_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the workers go by."""
    return clock.install(monkeypatch)


def in_hours(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).isoformat()


def one_slot() -> StandInEngine:
    return StandInEngine(slots=1, latency_s=0.01)


def test_a_running_job_stops_when_it_is_cancelled(line: Pipeline) -> None:
    worker = line.start_worker()
    id = line.submit(FOR_EVER)
    line.flush()
    line.wait_for(lambda: worker.engines and worker.engine.seen)
    line.control(CancelJob(id=id))
    line.wait_terminal(1)
    ((result,),) = line.results(1).values()
    worker.close()

    assert line.rows() == {id: "cancelled"}
    assert result.error is not None
    assert result.error.code == ErrorCode.CANCELLED


def test_a_waiting_job_that_is_cancelled_never_runs(line: Pipeline) -> None:
    worker = line.start_worker(one_slot, max_in_flight=4)  # one of those places is not for bulk
    running = {line.submit(FOR_EVER, tier="bulk", batch_id="running") for _ in range(3)}
    line.flush()
    line.wait_for(lambda: worker.engines and len(worker.engine.seen) == 3)
    waiting = {line.submit("x", tier="bulk", batch_id="waiting") for _ in range(5)}
    line.flush()
    line.wait_for(lambda: worker.worker.status().waiting["bulk"] == 5)
    line.control(CancelBatch(batch_id="waiting"))
    line.control(CancelBatch(batch_id="waiting"))
    line.wait_terminal(5)
    line.control(CancelBatch(batch_id="running"))
    line.wait_terminal(8)
    worker.close()

    assert line.rows() == dict.fromkeys(running | waiting, "cancelled")
    assert len(worker.engine.seen) == 3


@pytest.mark.parametrize("noted_in", ["topic", "table"])
def test_a_cancel_that_comes_before_its_job_holds(
    line: Pipeline, noted_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CATCH_UP_S", 120.0)
    cancel = CancelJob(job_id="mine")
    if noted_in == "table":
        line.ledger.apply_control([cancel])
    else:
        line.control(cancel)
    worker = line.start_worker()
    line.send({"job_id": "mine", "prompt": "x"})
    other = line.submit("x")
    line.wait_terminal(2)
    worker.close()

    assert line.states() == {"cancelled": 1, "succeeded": 1}
    assert worker.engine.seen == [str(other)]


def test_a_deadline_is_checked_on_arrival_while_waiting_and_while_running(
    line: Pipeline, worker_clock: Clock
) -> None:
    worker = line.start_worker(one_slot, max_in_flight=3)  # one of those places is not for bulk
    arrival = line.submit("x", deadline=in_hours(-1))
    running = line.submit(FOR_EVER, deadline=in_hours(2))
    in_engine = line.submit(FOR_EVER, deadline=in_hours(2))  # waits there for the only slot
    line.flush()
    line.wait_for(lambda: worker.engines and len(worker.engine.seen) == 2)
    waiting = line.submit("x", deadline=in_hours(1), tier="bulk")
    in_time = line.submit("x", deadline=in_hours(100), tier="bulk")
    line.flush()
    line.wait_for(lambda: worker.worker.status().waiting["bulk"] == 2)
    worker_clock.ahead = 3 * 3600
    line.wait_terminal(5)
    results = line.results(5)
    worker.close()

    expired = {arrival, running, in_engine, waiting}
    assert line.rows() == {**dict.fromkeys(expired, "expired"), in_time: "succeeded"}
    assert {results[id][0].error.code for id in expired} == {ErrorCode.DEADLINE_EXCEEDED}  # type: ignore[union-attr]
    assert {str(arrival), str(waiting)}.isdisjoint(worker.engine.seen)


def test_the_deadline_of_a_batch_holds_for_jobs_that_have_none(
    line: Pipeline, worker_clock: Clock, tmp_path: Path
) -> None:
    line.ledger.apply_control([BatchOpened(batch_id="b", expires_at=datetime.fromisoformat(in_hours(1)))])
    worker = line.start_worker()
    late = line.submit(FOR_EVER, batch_id="b")
    own = line.submit(f"until:{tmp_path / 'then'}", batch_id="b", deadline=in_hours(100))
    line.flush()
    line.wait_for(lambda: worker.engines and len(worker.engine.seen) == 2)
    worker_clock.ahead = 2 * 3600
    line.wait_terminal(1)
    (tmp_path / "then").touch()
    line.wait_terminal(2)
    worker.close()
    assert line.rows() == {late: "expired", own: "succeeded"}


def test_a_retry_does_not_outlive_the_deadline(line: Pipeline, worker_clock: Clock) -> None:
    worker = line.start_worker()
    id = line.submit("flaky:1000", deadline=in_hours(1))
    line.flush()
    line.wait_for(lambda: worker.engines and worker.engine.tries[str(id)] >= 2)
    worker_clock.ahead = 2 * 3600
    line.wait_terminal(1)
    worker.close()
    assert line.rows() == {id: "expired"}


def test_cancelling_what_has_ended_or_never_was_is_harmless(line: Pipeline) -> None:
    worker = line.start_worker()
    id = line.submit("x")
    line.wait_terminal(1)
    for target in (id, uuid7()):
        line.control(CancelJob(id=target))
    after = line.submit("y")
    line.wait_terminal(2)
    worker.close()
    assert line.rows() == {id: "succeeded", after: "succeeded"}
