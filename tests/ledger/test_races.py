"""Writers in the middle of each other's transactions."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from rows import attempt, job, outcome, query, state

from headrace.ledger import BatchState, Ledger
from headrace.ledger import attempts as attempts_module
from headrace.ledger import finish as finish_module
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
        (attempts_module, attempts_module.begin, attempt, JobState.RUNNING),
        (finish_module, finish_module.finish, outcome, JobState.SUCCEEDED),
    ],
)
def test_a_row_that_appears_between_update_and_insert_is_not_missed(
    ledger: Ledger,
    database_url: str,
    module: Any,
    write: Callable[[Any, Sequence[Any]], Any],
    row: Callable[[Any], Any],
    becomes: JobState,
) -> None:
    known, late = job(), job()
    ledger.record([known])
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        watched = JustBefore(cursor, module._INSERT, lambda: ledger.record([late]))
        done = write(watched, [row(known), row(late)])
    assert set(getattr(done, "changed", done)) == {known.id, late.id}
    assert [state(ledger, each.id) for each in (known, late)] == [becomes, becomes]
    counted = ledger.batch("acme", "b1")
    assert counted is not None
    assert counted.submitted == 2


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
        while query(database_url, "SELECT count(*) FROM pg_locks WHERE NOT granted") == [(0,)]:
            assert not applied.done()
            time.sleep(0.01)
        worker.execute(count, ["b2"])
        worker.commit()
        applied.result(60)
        found = [ledger.batch("acme", name) for name in ("b1", "b2")]
    assert [batch and (batch.state, batch.expected) for batch in found] == [
        (BatchState.CLOSED, 1),
        (BatchState.OPEN, None),
    ]
