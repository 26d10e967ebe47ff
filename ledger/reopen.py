"""Reopening what has ended, for its next run: jobs, and records that were rejected.

A record that is sent again names the run that it asks for. Whoever meets it first (the command that sent it, the
recorder, a worker) reopens its job, guarded on the run before, so that however often that is said it happens once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.ledger.counters import SUMMARY, Tally, changes
from headrace.ledger.database import Rows
from headrace.ledger.partitions import within
from headrace.ledger.rows import JobRow, RejectionRow
from headrace.ledger.staging import JOB_COLUMNS, columns, job_values, stage
from headrace.schemas import JobState

# What is counted is the row as it was, so that is what is returned.
_REOPEN = f"""
WITH changed AS (
    UPDATE jobs SET state = {JobState.QUEUED.code}, run = old.asked, attempt = 0, finished_at = NULL,
        prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, error_code = NULL
    FROM (
        SELECT jobs.id, jobs.state, jobs.attempt, jobs.prompt_tokens, jobs.cached_tokens, jobs.completion_tokens,
               incoming.run AS asked
        FROM incoming JOIN jobs ON jobs.id = incoming.id AND {within("jobs")}
        WHERE jobs.run = incoming.run - 1 AND jobs.content_sha = incoming.content_sha
          AND jobs.state > {JobState.RUNNING.code}
        ORDER BY incoming.id FOR NO KEY UPDATE OF jobs
    ) old
    WHERE jobs.id = old.id AND {within("jobs")} AND jobs.run = old.asked - 1 AND jobs.state > {JobState.RUNNING.code}
    RETURNING jobs.id, jobs.tenant, jobs.batch_id, jobs.pool, jobs.tier, jobs.submitted_at, old.state, old.attempt,
        old.prompt_tokens, old.cached_tokens, old.completion_tokens
) {SUMMARY}
"""

# Locked in the order of their places first, as jobs are (see staging.LOCKED).
_TAKE_BACK = """
UPDATE rejections r SET run = old.asked, reopened = true
FROM (
    SELECT src_topic, src_partition, src_offset, asked.run AS asked
    FROM unnest(%s::text[], %s::int[], %s::bigint[], %s::int[]) AS asked (src_topic, src_partition, src_offset, run)
    JOIN rejections USING (src_topic, src_partition, src_offset)
    WHERE rejections.run = asked.run - 1 AND NOT reopened
    ORDER BY src_topic, src_partition, src_offset FOR NO KEY UPDATE OF rejections
) old
WHERE (r.src_topic, r.src_partition, r.src_offset) = (old.src_topic, old.src_partition, old.src_offset)
  AND r.run = old.asked - 1 AND NOT r.reopened
RETURNING tenant, batch_id
"""


def reopen(cursor: Rows, rows: Sequence[JobRow | RejectionRow]) -> int:
    """Open the jobs and take back the rejections whose next run is the rows'; return how many did. Each id once."""
    tally = Tally()
    jobs = [row for row in rows if isinstance(row, JobRow)]
    reopened = []
    if jobs:
        days = stage(cursor, JOB_COLUMNS, (job_values(job, JobState.QUEUED.code, job.run, 0) for job in jobs))
        reopened = changes(cursor.execute(_REOPEN, days))
        tally.reopened(reopened)
    # A record that was rejected may be a job now, to a worker that reads more: its rejection is taken back as well.
    taken_back = take_back(cursor, rows, tally)
    tally.write(cursor)
    return sum(change.jobs for change in reopened) + taken_back


def take_back(cursor: Rows, rows: Iterable[JobRow | RejectionRow], tally: Tally) -> int:
    """Take back the rejections at the rows' places whose next run is theirs; return how many."""
    values = sorted(
        (row.src_topic, row.src_partition, row.src_offset, row.run) for row in rows if row.run > 1
    )
    if not values:
        return 0
    batches = cursor.execute(_TAKE_BACK, columns(values)).fetchall()
    tally.taken_back(batches)
    return len(batches)
