"""Retries on their way through a worker: parked until due, counted in the table, ended by a cancel."""

import time
from pathlib import Path

from pipeline import Pipeline
from standin import StandInEngine

from headrace.schemas import CancelBatch, CancelJob
from headrace.worker.retries import RETRIABLE

ATTEMPTS = "SELECT count(*) FROM attempts"
TRIED = """
WITH changed AS (UPDATE jobs SET attempt = %s RETURNING id)
INSERT INTO attempts (id, run, attempt, worker, group_size, ended_at, failed)
SELECT id, 1, number, 'gone', 0, now(), %s FROM changed, generate_series(1, %s) number
ON CONFLICT (id, run, attempt) DO UPDATE SET ended_at = excluded.ended_at, failed = excluded.failed RETURNING id
"""


def tried_before(line: Pipeline, attempts: int, *, failed: bool) -> None:
    """As if earlier workers had made so many attempts at the one job: each failed, or was given back at a clean stop."""
    line.query(TRIED, attempts, failed, attempts)


def test_the_attempts_of_a_job_are_counted_in_the_table_and_survive_a_kill(line: Pipeline) -> None:
    allowed = RETRIABLE["out_of_memory"].attempts
    first = line.start_process()
    id = line.submit("flaky:1000")
    line.flush()
    line.wait_for(lambda: line.query(ATTEMPTS) >= [(2,)])
    first.kill()
    first.wait()
    tried_before(line, allowed - 1, failed=True)  # as if it had failed minutes more

    second = line.start_process()
    line.wait_terminal(1)
    second.terminate()
    assert second.wait(120) == 0
    assert line.rows() == {id: "failed"}
    assert line.query("SELECT attempt, error_code FROM jobs") == [(allowed, "out_of_memory")]
    assert line.query("SELECT max(attempt) FROM attempts") == [(allowed,)]


def test_attempts_that_were_given_back_do_not_count_against_the_tries_of_a_job(line: Pipeline) -> None:
    allowed = RETRIABLE["out_of_memory"].attempts
    first = line.start_worker(lambda: StandInEngine(latency_s=1e9), grace_s=0.0)
    id = line.submit("flaky:1")
    line.flush()
    line.wait_for(lambda: first.engine.seen)
    first.close()
    assert line.query("SELECT died, failed FROM attempts WHERE ended_at IS NOT NULL") == [(False, False)]
    tried_before(line, 2 * allowed, failed=False)
    second = line.start_worker()
    line.wait_terminal(1)
    second.close()
    assert line.rows() == {id: "succeeded"}
    assert line.query("SELECT attempt FROM jobs") == [(2 * allowed + 2,)]
    assert line.query("SELECT attempt FROM attempts WHERE failed") == [(2 * allowed + 1,)]


def test_a_job_that_waits_for_its_next_try_keeps_its_offset_and_nobody_else_waiting(
    line: Pipeline, tmp_path: Path
) -> None:
    worker = line.start_worker()
    parked = line.submit(f"busy-unless:{tmp_path / 'room'}", batch_id="b")
    others = {line.submit("x") for _ in range(20)}
    line.wait_terminal(20)
    assert line.rows() == {parked: line.rows()[parked], **dict.fromkeys(others, "succeeded")}
    assert line.lag() >= 1
    line.wait_for(lambda: worker.engine.tries[str(parked)] >= 2)
    (tmp_path / "room").touch()
    line.wait_terminal(21)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()
    assert line.query("SELECT attempt FROM jobs WHERE id = %s", parked) == [
        (worker.engine.tries[str(parked)],)
    ]


def test_a_job_that_waits_for_its_next_try_is_cancelled_at_once(line: Pipeline) -> None:
    worker = line.start_worker()
    by_id = line.submit("flaky:1000")
    by_batch = line.submit("flaky:1000", batch_id="b")
    line.flush()
    line.wait_for(lambda: line.query(ATTEMPTS) >= [(8,)])  # the next waits are of seconds
    line.control(CancelJob(id=by_id))
    line.control(CancelBatch(batch_id="b"))
    line.wait_terminal(2)
    tries = line.query(ATTEMPTS)
    time.sleep(1.0)
    worker.close()
    assert line.rows() == {by_id: "cancelled", by_batch: "cancelled"}
    assert line.query(ATTEMPTS) == tries
