"""A cancelled or expired job ends with a record that says so, wherever it is when that happens."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from pipeline import Pipeline
from standin import StandInEngine

from headrace.schemas import BatchOpened, CancelBatch, CancelJob, ErrorCode, uuid7


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def one_slot() -> StandInEngine:
    return StandInEngine(slots=1, latency_s=0.01)


def test_a_running_job_stops_within_a_second_of_its_cancel(line: Pipeline) -> None:
    worker = line.start_worker()
    id = line.submit("slow:60")
    line.flush()
    line.wait_for(lambda: worker.engines and worker.engine.seen)
    line.control(CancelJob(id=id))
    asked = time.monotonic()
    line.wait_terminal(1)
    stopped = time.monotonic() - asked
    ((result,),) = line.results(1).values()
    worker.close()

    assert line.rows() == {id: "cancelled"}
    assert stopped < 20
    assert result.error is not None
    assert result.error.code == ErrorCode.CANCELLED


def test_a_waiting_job_that_is_cancelled_never_runs(line: Pipeline) -> None:
    worker = line.start_worker(one_slot, max_in_flight=4)  # one of those places is not for bulk
    running = {line.submit("slow:60", tier="bulk", batch_id="running") for _ in range(3)}
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
def test_a_cancel_that_comes_before_its_job_holds(line: Pipeline, noted_in: str) -> None:
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


def test_a_deadline_is_checked_on_arrival_while_waiting_and_while_running(line: Pipeline) -> None:
    worker = line.start_worker(one_slot, max_in_flight=3)  # one of those places is not for bulk
    arrival = line.submit("x", deadline=in_seconds(-5))
    running = line.submit("slow:60", deadline=in_seconds(8))
    in_engine = line.submit("slow:60", deadline=in_seconds(8))  # waits there for the only slot
    line.flush()
    line.wait_for(lambda: worker.engines and len(worker.engine.seen) == 2)
    waiting = line.submit("x", deadline=in_seconds(2), tier="bulk")
    in_time = line.submit("x", deadline=in_seconds(600), tier="bulk")
    line.wait_terminal(5)
    results = line.results(5)
    worker.close()

    expired = {arrival, running, in_engine, waiting}
    assert line.rows() == {**dict.fromkeys(expired, "expired"), in_time: "succeeded"}
    assert {results[id][0].error.code for id in expired} == {ErrorCode.DEADLINE_EXCEEDED}  # type: ignore[union-attr]
    assert {str(arrival), str(waiting)}.isdisjoint(worker.engine.seen)


def test_the_deadline_of_a_batch_holds_for_jobs_that_have_none(line: Pipeline) -> None:
    line.ledger.apply_control(
        [BatchOpened(batch_id="b", expires_at=datetime.now(UTC) + timedelta(seconds=2))]
    )
    worker = line.start_worker()
    late = line.submit("slow:60", batch_id="b")
    own = line.submit("slow:3", batch_id="b", deadline=in_seconds(600))
    line.wait_terminal(2)
    worker.close()
    assert line.rows() == {late: "expired", own: "succeeded"}


def test_a_retry_does_not_outlive_the_deadline(line: Pipeline) -> None:
    worker = line.start_worker()
    id = line.submit("flaky:1000", deadline=in_seconds(3))
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
