"""How many statements a write is made of: as many for a thousand rows as for two."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from rows import rejection

from headrace.ledger import Ledger, Letter
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, ControlMessage

NOW = datetime.now(UTC)


def control(count: int) -> list[ControlMessage]:
    batches = [f"b{number}" for number in range(count)]
    opened = [BatchOpened(batch_id=batch, input_ref="s3://in", metadata={"n": batch}) for batch in batches]
    closed = [BatchClosed(batch_id=batch, expected=1) for batch in batches]
    return [*opened, *closed, *(CancelBatch(batch_id=batch) for batch in batches)]


WRITES: dict[str, Callable[[Ledger, int], object]] = {
    "control": lambda ledger, count: ledger.apply_control(control(count)),
    "rejections": lambda ledger, count: ledger.reject([rejection(n) for n in range(count)]),
    "rejections again, of the next run": lambda ledger, count: ledger.reject(
        [rejection(n, run=2) for n in range(count)]
    ),
    "rejections taken back": lambda ledger, count: ledger.reopen([rejection(n, run=3) for n in range(count)]),
    "dead letters": lambda ledger, count: ledger.settle(
        [Letter("t", 0, n, NOW) for n in range(count)], "dropped"
    ),
}


def test_many_rows_take_no_more_statements_than_few(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[int] = []
    execute, executemany = psycopg.Cursor.execute, psycopg.Cursor.executemany

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        executed.append(1)
        return execute(self, *args, **kwargs)

    def many(self: Any, statement: Any, rows: Any, **kwargs: Any) -> Any:
        executed.extend([1] * len(rows))
        return executemany(self, statement, rows, **kwargs)

    ledger.backlog()  # a first connection asks what server it met
    monkeypatch.setattr(psycopg.Cursor, "execute", once)
    monkeypatch.setattr(psycopg.Cursor, "executemany", many)
    taken = {}
    for count in (2, 50):
        for name, write in WRITES.items():
            executed.clear()
            write(ledger, count)
            taken[name, count] = len(executed)
    assert {name: taken[name, 50] for name in WRITES} == {name: taken[name, 2] for name in WRITES}
