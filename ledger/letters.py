"""Which dead letters have been dealt with. The letters themselves stay on their topic, which nobody rewrites."""

from __future__ import annotations

from collections.abc import Collection

from headrace.ledger.database import Rows
from headrace.ledger.rows import Letter
from headrace.ledger.staging import columns

_SETTLE = """
INSERT INTO settled_letters (topic, partition, "offset", written_at, how)
SELECT *, %s FROM unnest(%s::text[], %s::int[], %s::bigint[], %s::timestamptz[])
ON CONFLICT DO NOTHING
"""


def settle(cursor: Rows, letters: Collection[Letter], how: str) -> None:
    """Note that these are dealt with; what was noted first stays. At least one."""
    places = sorted((each.topic, each.partition, each.offset, each.written_at) for each in letters)
    cursor.execute(_SETTLE, (how, *columns(places)))


def settled(cursor: Rows, topic: str) -> dict[Letter, str]:
    """The letters of a topic that are dealt with, and how."""
    cursor.execute(
        'SELECT topic, partition, "offset", written_at, how FROM settled_letters WHERE topic = %s', (topic,)
    )
    return {Letter(*place): how for *place, how in cursor.fetchall()}
