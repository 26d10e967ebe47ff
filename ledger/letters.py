"""Which dead letters have been dealt with. The letters themselves stay on their topic, which nobody rewrites."""

from __future__ import annotations

from collections.abc import Collection

from headrace.ledger.database import Rows
from headrace.ledger.rows import Letter

_SETTLE = """
INSERT INTO settled_letters (topic, partition, "offset", written_at, how) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT DO NOTHING
"""


def settle(cursor: Rows, letters: Collection[Letter], how: str) -> None:
    """Note that these are dealt with; what was noted first stays."""
    values = sorted((each.topic, each.partition, each.offset, each.written_at, how) for each in letters)
    cursor.executemany(_SETTLE, values)


def settled(cursor: Rows, topic: str) -> dict[Letter, str]:
    """The letters of a topic that are dealt with, and how."""
    cursor.execute(
        'SELECT topic, partition, "offset", written_at, how FROM settled_letters WHERE topic = %s', (topic,)
    )
    return {Letter(*place): how for *place, how in cursor.fetchall()}
