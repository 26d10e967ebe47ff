"""A job that the recorder enters while a worker's transaction is on its way."""

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from rows import attempt, job, outcome, state

from headrace.ledger import Ledger
from headrace.ledger import attempts as attempts_module
from headrace.ledger import finish as finish_module
from headrace.schemas import JobState


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
