"""Day partitions: made ahead, found by the time in an id, dropped when their day is long over.

An id of UUIDv7's layout begins with its time in milliseconds, so the ids of one UTC day are one range. Ids that name
no time begin with `ff` and go to a catch-all, `jobs_named`, behind all days. There is no DEFAULT partition: it would
have to be searched each time a day is added.

Days are made and dropped by two functions in the database (migrations 0005 and 0006) that run as the owner of the tables: so
recorders and workers need not own them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import LiteralString
from uuid import UUID

from headrace.ledger.database import Rows

AHEAD = 7
# A producer may name ids of its own up to 30 days before their record; those older days are made when they are met.
REACH = 31
_NAME = re.compile(r"(?:jobs|results|attempts)_(?:\d{8}|named)")
_EPOCH = date(1970, 1, 1).toordinal()
_DAY_MS = 86_400_000
_CATCH_ALL_FROM, _HIGHEST = UUID(int=0xFF << 120), UUID(int=(1 << 128) - 1)


def is_partition(table: str) -> bool:
    """Whether a table of this name is a partition of ours (migrations leave those alone)."""
    return _NAME.fullmatch(table) is not None


def day_of(id: UUID) -> date | None:
    """The UTC day whose partition holds `id`; None for the catch-all."""
    if id.bytes[0] == 0xFF:
        return None
    day = _EPOCH + (id.int >> 80) // _DAY_MS
    return date.fromordinal(day) if day < date.max.toordinal() else date.max


def first_id(day: date) -> UUID:
    """The lowest id of a day, where its partition begins."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return UUID(int=int(midnight.timestamp() * 1000) << 80)


def span(ids: Iterable[UUID]) -> dict[str, UUID]:
    """The parameters of `within`: where the first of the ids' partitions begins, and where the last one ends."""
    ordered = sorted(ids)
    first, last = day_of(ordered[0]), day_of(ordered[-1])
    return {
        "first": _CATCH_ALL_FROM if first is None else first_id(first),
        "last": _HIGHEST
        if last in (None, date.max)
        else UUID(int=first_id(last + timedelta(days=1)).int - 1),
    }


def within(table: str) -> str:
    """That a row of ``table`` lies in the partitions in question. Says nothing new, but to the planner.

    With 90 days kept, planner and executor would otherwise spend more on the partitions of other days than on the rows.
    Whole days, because the planner takes the range of a few new rows for all but empty, and then reads it once a row.
    """
    return f"{table}.id BETWEEN %(first)s AND %(last)s"


def today() -> date:
    """The UTC day."""
    return datetime.now(UTC).date()


def within_reach(day: date) -> bool:
    """Whether a missing partition for this day may be made: others are too old, or in a future nobody lives in."""
    return -REACH <= (day - today()).days <= AHEAD


def existing(cursor: Rows) -> frozenset[date]:
    """The days that `jobs` has a partition for. It gets its own last, so the other tables have them too."""
    cursor.execute(
        "SELECT right(c.relname, 8) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'jobs'::regclass AND c.relname ~ '_[0-9]{8}$' AND NOT i.inhdetachpending"
    )
    return frozenset(datetime.strptime(day, "%Y%m%d").date() for (day,) in cursor.fetchall())


def ensure(cursor: Rows, days: Iterable[date]) -> int:
    """Make the partitions that are missing for `days`; return for how many days."""
    missing = sorted(set(days) - existing(cursor))
    return sum(_says(cursor, "SELECT make_day(%s)", (day,)) for day in missing)


def retirable(cursor: Rows, before: date) -> list[date]:
    """Days before `before` in which every job is terminal."""
    old = sorted(day for day in existing(cursor) if day < before)
    return [day for day in old if not _has_live_rows(cursor, day)]


def _has_live_rows(cursor: Rows, day: date) -> bool:
    live = "SELECT EXISTS (SELECT FROM jobs WHERE id >= %s AND id < %s AND state < 2)"
    return _says(cursor, live, (first_id(day), first_id(day + timedelta(days=1))))


def drop(cursor: Rows, day: date) -> bool:
    """Drop one day of all three tables, unless a job in it came to life meanwhile, or another recorder did it."""
    return _says(cursor, "SELECT drop_day(%s)", (day,))


def _says(cursor: Rows, question: LiteralString, values: tuple[date, ...] | tuple[UUID, ...]) -> bool:
    (answer,) = cursor.execute(question, values).fetchone() or (False,)
    return bool(answer)
