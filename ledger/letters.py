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
# Instead of an update, to which the roles of deploy/roles.sql have no right here.
_FORGET_DROP = """
DELETE FROM settled_letters USING unnest(%s::text[], %s::int[], %s::bigint[], %s::timestamptz[])
    AS sent (topic, partition, "offset", written_at)
WHERE (settled_letters.topic, settled_letters.partition, settled_letters."offset", settled_letters.written_at)
    = (sent.topic, sent.partition, sent."offset", sent.written_at) AND how = 'dropped'
"""


def settle(cursor: Rows, letters: Collection[Letter], how: str) -> None:
    """Note that these are dealt with: `replayed`, which stays, or `dropped`, until it is replayed. At least one."""
    places = columns(sorted((each.topic, each.partition, each.offset, each.written_at) for each in letters))
    if how == "replayed":
        cursor.execute(_FORGET_DROP, places)
    cursor.execute(_SETTLE, (how, *places))


def settled(cursor: Rows, topic: str) -> dict[Letter, str]:
    """The letters of a topic that are dealt with, and how."""
    cursor.execute(
        'SELECT topic, partition, "offset", written_at, how FROM settled_letters WHERE topic = %s', (topic,)
    )
    return {Letter(*place): how for *place, how in cursor.fetchall()}
