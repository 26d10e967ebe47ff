"""What a worker asks before it takes a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from headrace.ledger.batches import IS_CANCELLED
from headrace.ledger.counters import STATES
from headrace.ledger.database import Rows
from headrace.ledger.partitions import span, within
from headrace.ledger.rows import JobRow, StoredJob

# An attempt is dead if its engine died, or if it never ended and its worker is the asker (who does not hold the job)
# or gives no sign of life. Only running jobs and those that ran before have attempts worth looking at.
_LOOKUP = f"""
SELECT asked.id, jobs.state, jobs.run, jobs.attempt, jobs.content_sha, {IS_CANCELLED.format(job="asked")},
       past.live_elsewhere, past.suspect, past.deaths_alone, past.group_size, past.failures, results.body::text, batches.expires_at,
       jobs.tenant = asked.tenant AND jobs.batch_id IS NOT DISTINCT FROM asked.batch_id
FROM unnest(%(ids)s::uuid[], %(tenants)s::text[], %(batches)s::text[]) AS asked (id, tenant, batch_id)
LEFT JOIN batches USING (tenant, batch_id)
LEFT JOIN jobs ON jobs.id = asked.id AND {within("jobs")}
LEFT JOIN results ON results.id = jobs.id AND {within("results")} AND results.run = jobs.run AND jobs.state > 1
LEFT JOIN LATERAL (
    SELECT coalesce(bool_or(NOT dead AND ended_at IS NULL), false) AS live_elsewhere,
           count(*) FILTER (WHERE dead) AS suspect,
           count(*) FILTER (WHERE dead AND group_size = 1) AS deaths_alone,
           min(group_size) FILTER (WHERE dead AND group_size > 0) AS group_size,
           count(*) FILTER (WHERE failed) AS failures
    FROM (
        SELECT ended_at, group_size, failed,
               died OR (ended_at IS NULL AND (worker = %(worker)s OR coalesce(alive_until, now()) <= now())) AS dead
        FROM attempts LEFT JOIN workers USING (worker)
        WHERE attempts.id = jobs.id AND {within("attempts")} AND attempts.run = jobs.run
    ) each
) past ON jobs.state < 2 AND jobs.attempt > 0
"""


def lookup(cursor: Rows, jobs: Sequence[JobRow], worker: str) -> dict[UUID, StoredJob]:
    """One StoredJob for each id asked about. `jobs` names each id once."""
    cursor.execute(
        _LOOKUP,
        {
            "ids": [job.id for job in jobs],
            "tenants": [job.tenant for job in jobs],
            "batches": [job.batch_id for job in jobs],
            "worker": worker,
            **span(job.id for job in jobs),
        },
        binary=True,
    )
    return {line[0]: _stored(*line) for line in cursor.fetchall()}


def _stored(
    id: UUID,
    state: int | None,
    run: int | None,
    attempt: int | None,
    content_sha: bytes | None,
    cancelled: bool,
    live_elsewhere: bool | None,
    suspect: int | None,
    deaths_alone: int | None,
    group_size: int | None,
    failures: int | None,
    body: str | None,
    expires_at: Any,
    same_batch: bool | None,
) -> StoredJob:
    return StoredJob(
        id=id,
        state=None if state is None else STATES[state],
        run=run or 1,
        attempt=attempt or 0,
        content_sha=content_sha,
        cancelled=cancelled,
        live_elsewhere=bool(live_elsewhere),
        suspect=suspect or 0,
        deaths_alone=deaths_alone or 0,
        group_size=group_size or 0,
        failures=failures or 0,
        result=None if body is None else body.encode(),
        expires_at=expires_at,
        same_batch=bool(same_batch),
    )
