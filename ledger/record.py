"""The recorder's writes: jobs as they arrive, and records that became none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from headrace.ledger.counters import RETURNING, SUMMARY, Tally, changes
from headrace.ledger.database import Rows
from headrace.ledger.partitions import within
from headrace.ledger.reopen import take_back
from headrace.ledger.rows import JobRow, RejectionRow
from headrace.ledger.staging import JOB_COLUMNS, columns, insert_absent, job_values, stage
from headrace.schemas import ErrorCode, JobState, clean_text

# Recorder and worker may both say it of one record.
DUPLICATE = "another job with this id and other content came first (its custom and batch ids are content too)"

_INSERT = f"WITH changed AS ({insert_absent()} {RETURNING}) {SUMMARY}"

# The same id, other content: whoever came first keeps it.
_DUPLICATES = f"""
SELECT incoming.id, jobs.tenant = incoming.tenant AND jobs.batch_id IS NOT DISTINCT FROM incoming.batch_id
FROM incoming JOIN jobs ON jobs.id = incoming.id AND {within("jobs")}
WHERE jobs.content_sha <> incoming.content_sha
"""

# A rejection that was taken back may come again, in the run that it was taken back for.
_REJECT = """
INSERT INTO rejections (src_topic, src_partition, src_offset, tenant, batch_id, custom_id, code, message, run, submission,
    same_batch)
SELECT * FROM unnest(%s::text[], %s::int[], %s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::int[],
    %s::text[], %s::boolean[])
ON CONFLICT (src_topic, src_partition, src_offset) DO UPDATE SET
    tenant = excluded.tenant, batch_id = excluded.batch_id, custom_id = excluded.custom_id,
    code = excluded.code, message = excluded.message, rejected_at = now(), reopened = false,
    submission = excluded.submission, same_batch = excluded.same_batch
WHERE rejections.reopened AND rejections.run = excluded.run
RETURNING src_topic, src_partition, src_offset
"""


def record(cursor: Rows, jobs: Sequence[JobRow]) -> int:
    """Insert what is new and count it; return how many. `jobs` names each id once."""
    tally = Tally()
    days = stage(cursor, JOB_COLUMNS, (job_values(job, JobState.QUEUED.code, 1, 0) for job in jobs))
    inserted = changes(cursor.execute(_INSERT))
    tally.inserted(inserted)
    new = sum(change.jobs for change in inserted)
    if new < len(jobs):
        first: dict[UUID, bool] = dict(cursor.execute(_DUPLICATES, days).fetchall())
        duplicates = [duplicate(job, same_batch=first[job.id]) for job in jobs if job.id in first]
        _insert_rejections(cursor, duplicates, tally)
    tally.write(cursor)
    return new


def reject(cursor: Rows, rejections: Sequence[RejectionRow]) -> int:
    """Insert the rejections that are not there yet and count them; return how many."""
    tally = Tally()
    new = _insert_rejections(cursor, rejections, tally)
    tally.write(cursor)
    return new


def _insert_rejections(cursor: Rows, rejections: Sequence[RejectionRow], tally: Tally) -> int:
    by_source = {(row.src_topic, row.src_partition, row.src_offset): row for row in rejections}
    if not by_source:
        return 0
    take_back(cursor, by_source.values(), tally)
    values = [
        (
            *source,
            row.tenant,
            row.batch_id,
            row.custom_id,
            str(row.code),
            row.message,
            row.run,
            row.submission,
            row.same_batch,
        )
        for source, row in sorted(by_source.items())
    ]
    new = [by_source[source] for source in cursor.execute(_REJECT, columns(values)).fetchall()]
    tally.rejected(new)
    return len(new)


def rejection(job: JobRow, code: ErrorCode, message: str) -> RejectionRow:
    """A job turned away, at its own source."""
    return RejectionRow(
        job.src_topic,
        job.src_partition,
        job.src_offset,
        job.tenant,
        code,
        message,
        job.batch_id,
        job.custom_id,
        job.run,
        job.submission,
    )


def cleaned(row: RejectionRow) -> RejectionRow:
    """The same with text that Postgres takes: what is rejected may be rejected for its text."""
    return replace(
        row,
        tenant=clean_text(row.tenant),
        message=clean_text(row.message),
        batch_id=None if row.batch_id is None else clean_text(row.batch_id),
        custom_id=None if row.custom_id is None else clean_text(row.custom_id),
    )


def duplicate(job: JobRow, same_batch: bool) -> RejectionRow:
    """The second job of one id, with other content than the first. same_batch: both are of one batch."""
    return replace(rejection(job, ErrorCode.DUPLICATE_JOB_ID, DUPLICATE), same_batch=same_batch)
