"""Counters of batches and tiers, derived from what a statement returned, in the transaction that returned it.

Queued is never stored: it is submitted - running - terminal. Each counter is spread over SHARDS rows, one picked at
random for each transaction, so that writers seldom wait for each other. They are written last in a transaction and in
key order: whoever holds a counter waits for nothing but later counters.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar
from uuid import UUID

from headrace.ledger.database import Rows
from headrace.ledger.rows import RejectionRow
from headrace.ledger.staging import columns
from headrace.schemas import JobState

K = TypeVar("K", bound=tuple[str | datetime, ...])

SHARDS = 8
BATCH = (
    "submitted",
    "running",
    "succeeded",
    "failed",
    "cancelled",
    "expired",
    "rejected",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)
TIER = ("submitted", "running", "finished")

STATES = tuple(JobState)
"""States by their code."""

# Follows a WITH that names the rows a statement wrote `changed`. One line for each batch, tier, minute and state.
SUMMARY = """
SELECT tenant, batch_id, pool, tier, date_trunc('minute', submitted_at), state,
       count(*), count(*) FILTER (WHERE attempt > 0), count(*) FILTER (WHERE attempt = 1),
       sum(prompt_tokens)::bigint, sum(cached_tokens)::bigint, sum(completion_tokens)::bigint, array_agg(id)
FROM changed GROUP BY 1, 2, 3, 4, 5, 6
"""

_SUMMED = (
    "id",
    "tenant",
    "batch_id",
    "pool",
    "tier",
    "submitted_at",
    "state",
    "attempt",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)

RETURNING = "RETURNING " + ", ".join(f"jobs.{name}" for name in _SUMMED)
"""What a statement must return for SUMMARY."""


class Change(NamedTuple):
    """One line of SUMMARY. `started`: jobs that were ever started; `first`: those in their first attempt."""

    tenant: str
    batch_id: str | None
    pool: str
    tier: str
    minute: datetime
    state: int
    jobs: int
    started: int
    first: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ids: list[UUID]


class Tally:
    """What one transaction adds to the counters."""

    def __init__(self) -> None:
        self.batches: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.tiers: defaultdict[tuple[str, str, datetime], Counter[str]] = defaultdict(Counter)

    def inserted(self, changes: Iterable[Change]) -> None:
        """Count jobs that were not there before, in whatever state they were inserted."""
        for change in changes:
            self._add(change, submitted=change.jobs)
            if change.state == JobState.RUNNING.code:
                self._add(change, running=change.jobs)
            elif change.state != JobState.QUEUED.code:
                self._end(change)

    def started(self, changes: Iterable[Change]) -> None:
        """Count jobs that went from queued to running; those that only start again were counted before."""
        for change in changes:
            self._add(change, running=change.first)

    def finished(self, changes: Iterable[Change]) -> None:
        """Count jobs that became terminal; those never started were not running."""
        for change in changes:
            self._add(change, running=-change.started)
            self._end(change)

    def reopened(self, changes: Iterable[Change]) -> None:
        """Take back how jobs ended, given as they were: they are queued again."""
        for change in changes:
            self._end(change, -1)

    def rejected(self, rows: Iterable[RejectionRow]) -> None:
        """Count rejected records against the batches that they name."""
        self._reject(((row.tenant, row.batch_id) for row in rows), 1)

    def taken_back(self, batches: Iterable[tuple[str, str | None]]) -> None:
        """Take back rejections, given by the batches that they count against."""
        self._reject(batches, -1)

    def _reject(self, batches: Iterable[tuple[str, str | None]], sign: int) -> None:
        for tenant, batch_id in batches:
            if batch_id is not None:
                self.batches[tenant, batch_id]["rejected"] += sign

    def _end(self, change: Change, sign: int = 1) -> None:
        tokens = {
            name: sign * getattr(change, name)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        }
        ended = sign * change.jobs
        self._add(change, finished=ended, **{STATES[change.state]: ended}, **tokens)

    def _add(self, change: Change, **counts: int) -> None:
        self.tiers[change.pool, change.tier, change.minute].update(counts)
        if change.batch_id is not None:
            self.batches[change.tenant, change.batch_id].update(counts)

    def write(self, cursor: Rows) -> None:
        """Add it all. The last thing a transaction does."""
        shard = random.randrange(SHARDS)
        batches, tiers = _lines(self.batches, BATCH, shard), _lines(self.tiers, TIER, shard)
        if batches:
            arrays = columns(batches)
            cursor.execute(_OPEN_BATCH, arrays[:2])
            cursor.execute(_ADD_BATCH, arrays)
        if tiers:
            cursor.execute(_ADD_TIER, columns(tiers))


def changes(cursor: Rows) -> list[Change]:
    """The lines of a SUMMARY just executed."""
    return [Change(*line) for line in cursor.fetchall()]


def _lines(counts: Mapping[K, Counter[str]], names: Sequence[str], shard: int) -> list[tuple[object, ...]]:
    """Parameters of an upsert for each key, in key order, without those that add nothing."""
    lines: list[tuple[object, ...]] = []
    for key in sorted(counts):
        added = [counts[key][name] for name in names]
        if any(added):
            lines.append((*key, shard, *added))
    return lines


def _upsert(table: str, keys: Mapping[str, str], names: Sequence[str]) -> str:
    """Adds lines, given as an array for each column. `keys`: the key's columns and their types."""
    types = {**keys, "shard": "smallint", **dict.fromkeys(names, "bigint")}
    additions = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in names)
    return (
        f"INSERT INTO {table} ({', '.join(types)})"
        f" SELECT * FROM unnest({', '.join(f'%s::{type}[]' for type in types.values())})"
        f" ON CONFLICT ({', '.join(keys)}, shard) DO UPDATE SET {additions}"
    )


_BATCH_KEY = {"tenant": "text", "batch_id": "text"}
_OPEN_BATCH = """
INSERT INTO batches (tenant, batch_id) SELECT * FROM unnest(%s::text[], %s::text[]) ON CONFLICT DO NOTHING
"""
_ADD_BATCH = _upsert("batch_counts", _BATCH_KEY, BATCH)
_ADD_TIER = _upsert("tier_counts", {"pool": "text", "tier": "text", "minute": "timestamptz"}, TIER)
