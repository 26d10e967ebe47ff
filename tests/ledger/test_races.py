"""Writers in the middle of each other's transactions."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from rows import attempt, job, jobs, outcome, query, state

from headrace.ledger import BatchState, Ledger
from headrace.ledger import attempts as attempts_module
from headrace.ledger import finish as finish_module
from headrace.ledger.record import record
from headrace.schemas import BatchClosed, BatchOpened, JobState


class JustBefore:
    """A cursor that lets something else happen just before one statement is executed."""

    def __init__(self, cursor: Any, statement: str, happen: Callable[[], object]) -> None:
        self._cursor, self._statement, self._happen = cursor, statement, happen

    def execute(self, statement: str, *args: Any) -> Any:
        if statement == self._statement:
            self._happen()
        return self._cursor.execute(statement, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


@pytest.mark.parametrize(
    ("module", "write", "row", "becomes"),
    [
        (attempts_module, attempts_module.begin_absent, attempt, JobState.RUNNING),
        (finish_module, finish_module.finish_absent, outcome, JobState.SUCCEEDED),
    ],
)
def test_a_row_that_appears_just_before_its_insert_is_not_missed(
    ledger: Ledger,
    database_url: str,
    module: Any,
    write: Callable[[Any, Sequence[Any]], Any],
    row: Callable[[Any], Any],
    becomes: JobState,
) -> None:
    absent, late = job(), job()
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        watched = JustBefore(cursor, module._INSERT, lambda: ledger.record([late]))
        done = write(watched, [row(absent), row(late)])
    assert set(getattr(done, "changed", done)) == {absent.id, late.id}
    assert [state(ledger, each.id) for each in (absent, late)] == [becomes, becomes]
    counted = ledger.batch("acme", "b1")
    assert counted is not None
    assert counted.submitted == 2


@pytest.mark.parametrize(("write", "row"), [("begin", attempt), ("finish", outcome)])
def test_a_worker_and_a_recorder_with_the_same_jobs_do_not_deadlock(
    database_url: str, write: str, row: Callable[[Any], Any]
) -> None:
    """The recorder is halted between two jobs, one without a row and one with, that a worker then writes to."""
    absent, halted, known = sorted(jobs(3), key=lambda each: each.id)
    with (
        Ledger(database_url, retry_for=0) as ledger,  # a deadlock would not be retried
        psycopg.connect(database_url) as somebody,
        ThreadPoolExecutor(2) as others,
    ):
        ledger.record([known])
        record(somebody.cursor(), [halted])
        recorder = others.submit(ledger.record, [absent, halted, known])
        wait_for_waiting(database_url, 1)
        worker = others.submit(getattr(ledger, write), [row(absent), row(known)])
        wait_for_waiting(database_url, 2)
        somebody.rollback()
        new, done = recorder.result(60), worker.result(60)
    assert new == 2
    assert getattr(done, "changed" if write == "finish" else "started") == {absent.id, known.id}


def wait_for_waiting(database_url: str, count: int) -> None:
    """Return once so many sessions wait for a lock."""
    waiting = (
        "SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE NOT granted AND datname = current_database()"
    )
    until = time.monotonic() + 60
    while query(database_url, waiting) != [(count,)]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_control_messages_and_a_worker_that_counts_the_same_batches_do_not_deadlock(
    database_url: str,
) -> None:
    messages = [
        BatchOpened(tenant="acme", batch_id="b2"),
        BatchClosed(tenant="acme", batch_id="b1", expected=1),
    ]
    count = "INSERT INTO batches (tenant, batch_id) VALUES ('acme', %s) ON CONFLICT DO NOTHING"
    with (
        Ledger(database_url, retry_for=0) as ledger,  # a deadlock would not be retried
        psycopg.connect(database_url) as worker,
        ThreadPoolExecutor(1) as recorder,
    ):
        worker.execute(count, ["b1"])
        applied = recorder.submit(ledger.apply_control, messages)
        wait_for_waiting(database_url, 1)
        worker.execute(count, ["b2"])
        worker.commit()
        applied.result(60)
        found = [ledger.batch("acme", name) for name in ("b1", "b2")]
    assert [batch and (batch.state, batch.expected) for batch in found] == [
        (BatchState.CLOSED, 1),
        (BatchState.OPEN, None),
    ]
