"""Attempts: written before a job is dispatched, ended when it ends; what never ended tells of a death."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from uuid import UUID

from headrace.ledger.counters import RETURNING, SUMMARY, Change, Tally, changes
from headrace.ledger.database import Rows
from headrace.ledger.partitions import span, within
from headrace.ledger.rows import AttemptRow
from headrace.ledger.staging import JOB_COLUMNS, LOCKED, insert_absent, job_values, stage
from headrace.schemas import JobState

_COLUMNS = (*JOB_COLUMNS, "worker", "group_size")

_OPENED = """
opened AS (
    INSERT INTO attempts (id, run, attempt, worker, group_size)
    SELECT id, run, attempt, worker, group_size FROM incoming WHERE id IN (SELECT id FROM changed)
    ON CONFLICT DO NOTHING
)
"""

_INSERT = f"WITH changed AS ({insert_absent()} {RETURNING}), {_OPENED} {SUMMARY}"

# Compare and set: of two workers that read the same attempt number, one takes the next.
_START = f"""
WITH changed AS (
    UPDATE jobs SET state = {JobState.RUNNING.code}, attempt = new.attempt
    FROM {LOCKED} new
    WHERE jobs.id = new.id AND {within("jobs")} AND jobs.run = new.run AND jobs.content_sha = new.content_sha
      AND jobs.state IN ({JobState.QUEUED.code}, {JobState.RUNNING.code}) AND jobs.attempt = new.attempt - 1
    {RETURNING}
), {_OPENED} {SUMMARY}
"""

# What an earlier try of this very call committed before its answer was lost.
_OURS = f"""
SELECT incoming.id FROM incoming
JOIN attempts ON attempts.id = incoming.id AND {within("attempts")}
    AND attempts.run = incoming.run AND attempts.attempt = incoming.attempt
JOIN jobs ON jobs.id = incoming.id AND {within("jobs")} AND jobs.run = incoming.run AND jobs.state = {JobState.RUNNING.code}
WHERE attempts.worker = incoming.worker AND attempts.ended_at IS NULL
"""

_END = f"""
UPDATE attempts SET ended_at = now(), died = %(died)s, failed = %(failed)s
FROM (SELECT id FROM attempts WHERE id = ANY(%(ids)s) AND {within("attempts")}
      AND worker = %(worker)s AND ended_at IS NULL
      ORDER BY id FOR UPDATE) mine
WHERE attempts.id = mine.id AND {within("attempts")} AND worker = %(worker)s AND ended_at IS NULL
"""


def begin(cursor: Rows, attempts: Sequence[AttemptRow]) -> set[UUID]:
    """Open the attempts at jobs that have a row, where they may be opened. `attempts` names each id once."""
    days, tally = _stage(cursor, attempts), Tally()
    done = changes(cursor.execute(_START, days))
    tally.started(done)
    tally.write(cursor)
    return _ids(done)


def begin_absent(cursor: Rows, attempts: Sequence[AttemptRow]) -> set[UUID]:
    """The same for what `begin` left out: a job without a row gets one (see staging.insert_absent)."""
    days, tally = _stage(cursor, attempts), Tally()
    inserted = changes(cursor.execute(_INSERT, days))
    tally.inserted(inserted)
    begun = _ids(inserted)
    if len(begun) < len(attempts):  # the recorder may have inserted it at this very moment
        started = changes(cursor.execute(_START, days))
        tally.started(started)
        begun |= _ids(started)
        begun.update(id for (id,) in cursor.execute(_OURS, days))
    tally.write(cursor)
    return begun


def end(cursor: Rows, worker: str, ids: Collection[UUID], died: bool, failed: bool) -> None:
    """End this worker's open attempts at `ids`."""
    cursor.execute(_END, {"worker": worker, "ids": list(ids), "died": died, "failed": failed, **span(ids)})


def _stage(cursor: Rows, attempts: Sequence[AttemptRow]) -> dict[str, UUID]:
    running = JobState.RUNNING.code
    rows = (
        (*job_values(row.job, running, row.run, row.attempt), row.worker, row.group_size) for row in attempts
    )
    return stage(cursor, _COLUMNS, rows)


def _ids(done: Iterable[Change]) -> set[UUID]:
    return {id for change in done for id in change.ids}
