"""What people and programs ask of the table: jobs, batches, results, the backlog."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

from psycopg import sql
from psycopg.rows import kwargs_row

from headrace.ledger.batches import IS_CANCELLED
from headrace.ledger.counters import STATES
from headrace.ledger.database import Rows
from headrace.ledger.partitions import span, within
from headrace.ledger.rows import (
    BatchProgress,
    BatchState,
    EndedJob,
    JobRow,
    JobStatus,
    RejectionRow,
    StoredResult,
    TierBacklog,
)
from headrace.ledger.staging import columns
from headrace.schemas import JobState

PAGE = 1000
SENT_PAGE = 10_000
ENDED_PAGE = (
    20_000  # a page is read back from Kafka in the order of its offsets: the larger, the fewer the detours
)

_RESULTS = """
SELECT jobs.id, jobs.run, jobs.custom_id, jobs.state, results.body::text, results.uri
FROM jobs JOIN results ON results.id = jobs.id AND results.run = jobs.run
WHERE jobs.state > 1 AND
"""
# Of a run that a later one may have followed: the job's state is no longer that run's.
_RESULTS_OF_RUN = """
SELECT jobs.id, results.run, jobs.custom_id, results.body ->> 'state', results.body::text, results.uri
FROM jobs JOIN results ON results.id = jobs.id AND results.run = %s
WHERE
"""
_PAGE_OF_BATCH = " tenant = %s AND batch_id = %s AND jobs.id > %s ORDER BY jobs.id LIMIT %s"


def job(cursor: Rows, id: UUID) -> JobStatus | None:
    """One line of `job_status`."""
    named = cursor.connection.cursor(row_factory=kwargs_row(_job_status))
    return named.execute("SELECT * FROM job_status WHERE id = %s", (id,)).fetchone()


def _job_status(*, state: str, **columns: object) -> JobStatus:
    return JobStatus(state=JobState(state), **columns)  # type: ignore[arg-type]


def batch(cursor: Rows, tenant: str, batch_id: str) -> BatchProgress | None:
    """One line of `batch_progress`, and the sending that its count is of."""
    named = cursor.connection.cursor(row_factory=kwargs_row(_batch_progress))
    query = (
        "SELECT progress.*, submission FROM batch_progress progress JOIN batches USING (tenant, batch_id)"
        " WHERE tenant = %s AND batch_id = %s"
    )
    return named.execute(query, (tenant, batch_id)).fetchone()


def _batch_progress(*, state: str, **columns: object) -> BatchProgress:
    return BatchProgress(state=BatchState(state), **columns)  # type: ignore[arg-type]


def has_batch(cursor: Rows, batch_id: str) -> bool:
    """Whether any tenant has a batch of this name. Reads all names of batches where it is nobody's."""
    query = "SELECT FROM batches WHERE batch_id = %s LIMIT 1"
    return cursor.execute(query, (batch_id,)).fetchone() is not None


def result(cursor: Rows, id: UUID) -> StoredResult | None:
    """The result of a job's current run."""
    line = cursor.execute(sql.SQL(_RESULTS + "jobs.id = %s"), (id,)).fetchone()
    return None if line is None else _result(*line)


def results_page(
    cursor: Rows, tenant: str, batch_id: str, run: int | None, after: UUID | None
) -> list[StoredResult]:
    """The next PAGE results of a batch behind `after`, in id order: of one run, or of each job's current one."""
    page = tenant, batch_id, after or UUID(int=0), PAGE
    if run is None:
        cursor.execute(sql.SQL(_RESULTS + _PAGE_OF_BATCH), page)
        return [_result(*line) for line in cursor.fetchall()]
    cursor.execute(sql.SQL(_RESULTS_OF_RUN + _PAGE_OF_BATCH), (run, *page))
    return [
        StoredResult(id, run, custom_id, JobState(state), body.encode(), uri)
        for id, run, custom_id, state, body, uri in cursor.fetchall()
    ]


def has_run(cursor: Rows, tenant: str, batch_id: str, run: int) -> bool:
    """Whether any job of the batch has come to this run."""
    query = "SELECT FROM jobs WHERE tenant = %s AND batch_id = %s AND run >= %s LIMIT 1"
    return cursor.execute(query, (tenant, batch_id, run)).fetchone() is not None


def _result(
    id: UUID, run: int, custom_id: str | None, state: int, body: str, uri: str | None
) -> StoredResult:
    return StoredResult(id, run, custom_id, STATES[state], body.encode(), uri)


# Cancels and deadlines as workers find them when they look a job up, cancels first.
_BOUND_FOR = f"""
CASE WHEN {IS_CANCELLED} THEN {JobState.CANCELLED.code}
     WHEN coalesce(deadline, expires_at) <= now() THEN {JobState.EXPIRED.code} END
"""
_ENDED = f"""
SELECT id, tenant, tier, content_sha, src_topic, src_partition, src_offset, submitted_at, pool, job_id, batch_id,
       custom_id, model, deadline, run, {_BOUND_FOR.format(job="jobs")} AS bound_for
FROM jobs LEFT JOIN batches USING (tenant, batch_id)
WHERE tenant = %s AND batch_id = %s AND id > %s AND state = ANY(%s) ORDER BY id LIMIT %s
"""


def ended_page(
    cursor: Rows, tenant: str, batch_id: str, states: Collection[JobState], after: UUID | None
) -> list[EndedJob]:
    """The next jobs of a batch that ended in one of these states, in id order, each with the run that ended."""
    named = cursor.connection.cursor(row_factory=kwargs_row(_ended))
    codes = [state.code for state in states]
    named.execute(_ENDED, (tenant, batch_id, after or UUID(int=0), codes, ENDED_PAGE))
    return named.fetchall()


def _ended(*, bound_for: int | None, **columns: object) -> EndedJob:
    return EndedJob(JobRow(**columns), None if bound_for is None else STATES[bound_for])  # type: ignore[arg-type]


_SENT_BOUND_FOR = f"""
SELECT {_BOUND_FOR.format(job="sent")}
FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::timestamptz[])
    WITH ORDINALITY AS sent (id, tenant, batch_id, deadline, place) LEFT JOIN batches USING (tenant, batch_id)
ORDER BY place
"""


def bound_for(cursor: Rows, rows: Sequence[JobRow | RejectionRow]) -> dict[JobRow | RejectionRow, JobState]:
    """The jobs among the rows that could only end so, each with its state. They need not be in the table."""
    jobs = [row for row in rows if isinstance(row, JobRow)]
    if not jobs:
        return {}
    asked = columns((job.id, job.tenant, job.batch_id, job.deadline) for job in jobs)
    states = [code for (code,) in cursor.execute(_SENT_BOUND_FOR, asked)]
    return {job: STATES[code] for job, code in zip(jobs, states, strict=True) if code is not None}


def is_cancelled(cursor: Rows, tenant: str, batch_id: str) -> bool:
    """Whether a cancel of the batch has come."""
    query = "SELECT FROM cancels WHERE tenant = %s AND kind = 'batch' AND target = %s"
    return cursor.execute(query, (tenant, batch_id)).fetchone() is not None


_OTHER_CONTENT = f"""
SELECT jobs.id, jobs.batch_id
FROM unnest(%(ids)s::uuid[], %(contents)s::bytea[]) AS sent (id, content_sha) JOIN jobs ON jobs.id = sent.id
WHERE jobs.content_sha <> sent.content_sha AND {within("jobs")}
"""


def other_content(cursor: Rows, sent: Sequence[tuple[UUID, bytes]]) -> list[tuple[UUID, str | None]]:
    """Of the jobs ``sent``, ids and contents, those whose id has another content here, each with its batch."""
    ids, contents = [id for id, _ in sent], [content for _, content in sent]
    cursor.execute(_OTHER_CONTENT, {"ids": ids, "contents": contents, **span(ids)})
    return cursor.fetchall()


def rejections(cursor: Rows, tenant: str, batch_id: str) -> list[RejectionRow]:
    """The batch's rejected records, in source order: of several sendings those of the one that its count is of."""
    named = cursor.connection.cursor(row_factory=kwargs_row(RejectionRow))
    named.execute(
        "SELECT src_topic, src_partition, src_offset, tenant, code, message, batch_id, custom_id, run, r.submission, same_batch"
        " FROM rejections r LEFT JOIN batches b USING (tenant, batch_id)"
        " WHERE tenant = %s AND batch_id = %s AND NOT reopened AND (r.submission = b.submission) IS NOT FALSE"
        " ORDER BY src_topic, src_partition, src_offset",
        (tenant, batch_id),
    )
    return named.fetchall()


def backlog(cursor: Rows) -> list[TierBacklog]:
    """`tier_backlog`, whole."""
    named = cursor.connection.cursor(row_factory=kwargs_row(TierBacklog))
    return named.execute("SELECT * FROM tier_backlog ORDER BY pool, tier").fetchall()
