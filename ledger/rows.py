"""What goes into the job table and what comes out of it, as frozen records.

Times are timezone-aware, ids are UUIDs (schemas/ids.py), hashes and bodies are bytes. Rows going in carry no clock
of the caller's own: when something ended or started is the database's `now()`, so workers' clocks may differ.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

from headrace.schemas import Envelope, ErrorCode, JobError, JobResult, JobState, Source


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as it was submitted: what the recorder and the workers both know of it.

    `run` is the one that its record asks for: 1, or the next for a record that was sent again (see `reopen`).
    `submission` is which sending of its batch the record is of; it is not kept, but goes with a rejection.
    """

    id: UUID
    tenant: str
    tier: str
    content_sha: bytes
    src_topic: str
    src_partition: int
    src_offset: int
    submitted_at: datetime
    pool: str = "default"
    job_id: str | None = None
    batch_id: str | None = None
    custom_id: str | None = None
    model: str | None = None
    deadline: datetime | None = None
    run: int = 1
    submission: str | None = None

    @classmethod
    def of(
        cls, envelope: Envelope, source: Source, tier: str, pool: str, submission: str | None = None
    ) -> JobRow:
        """The row of a record that was read in full or only as an envelope."""
        id, tenant, job_id, batch_id, custom_id, model, deadline, content_sha, submitted_at = envelope
        topic, partition, offset, _, _, run = source
        return cls(
            id, tenant, tier, content_sha, topic, partition, offset, submitted_at, pool, job_id, batch_id, custom_id, model,
            deadline, run, submission,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RejectionRow:
    """A record that became no job: unparsable, a duplicate with other content, an id outside the days kept.

    Its key is where it came from, so the recorder and a worker may both report it and it counts once. `run` is as for
    a job: a record that was rejected and sent again is rejected anew only in that run.

    `submission` is which sending of its batch the record is of, where it says so; `same_batch` says of a duplicate that
    the job which came first is of the same batch, and so ends in it.
    """

    src_topic: str
    src_partition: int
    src_offset: int
    tenant: str
    code: str
    message: str = ""
    batch_id: str | None = None
    custom_id: str | None = None
    run: int = 1
    submission: str | None = None
    same_batch: bool = False


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One worker's intent to run a job, written before it is dispatched.

    `attempt` is the stored one plus one (1 for a job without a row). `group_size` is 0 for an ordinary attempt, and
    the number of jobs in the group for one that runs set apart as a suspect (1: alone).
    """

    job: JobRow
    worker: str
    attempt: int = 1
    run: int = 1
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """How a job ended: its terminal state and the JobResult to keep.

    `attempt` is 0 for a job that ended without being started (expired, cancelled or invalid on arrival). `body` is
    the encoded JobResult as it is published. Where an answer is too large for that, the JobResult refers to it, and
    `uri`, `size` (in bytes) and `sha256` say where it is.
    """

    job: JobRow
    state: JobState
    body: bytes
    run: int = 1
    attempt: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error_code: str | None = None
    error: str | None = None
    uri: str | None = None
    size: int | None = None
    sha256: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the table says of one id that a worker asked about.

    `state` is None where the job has no row yet. `suspect` counts the attempts of this run whose worker or engine
    died, `deaths_alone` those among them that ran alone, `group_size` the smallest group set apart that died with
    it (0: none was set apart), `failures` the attempts that failed and were to be tried again. `live_elsewhere` means
    another live worker holds an open attempt. `result` is the encoded JobResult of a terminal job, `expires_at` its
    batch's deadline for jobs that have none. `same_batch`: the row is of the batch that was asked about.
    """

    id: UUID
    state: JobState | None = None
    run: int = 1
    attempt: int = 0
    content_sha: bytes | None = None
    cancelled: bool = False
    live_elsewhere: bool = False
    suspect: int = 0
    deaths_alone: int = 0
    group_size: int = 0
    failures: int = 0
    result: bytes | None = None
    expires_at: datetime | None = None
    same_batch: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """What one `Ledger.begin` did: the ids that may run now, and why Postgres would not take a row.

    A refused job can be neither run nor finished: reject its record (`ledger_rejected`). `id in begun` asks for the
    started ones.
    """

    started: frozenset[UUID] = frozenset()
    refused: Mapping[UUID, str] = field(default_factory=dict)

    def __contains__(self, id: object) -> bool:
        return id in self.started


@dataclass(frozen=True, slots=True)
class Finished:
    """What one `Ledger.finish` did.

    `changed`: ids whose row this call made terminal as asked: publish them. `winners`: for the other ids, the
    encoded JobResult that the table holds: publish that one. `refused`: why Postgres would not take a row; such an
    id ended as `failed: ledger_rejected`, and its body is among the winners (if not even that was taken, it is not
    there: reject the record). An id in none of the three has a row of other content or of a later run: publish
    nothing.

    A winner may be the caller's own body: where an earlier call wrote it, and then raised LedgerUnavailable.
    """

    changed: frozenset[UUID] = frozenset()
    winners: Mapping[UUID, bytes] = field(default_factory=dict)
    refused: Mapping[UUID, str] = field(default_factory=dict)


class BatchState(enum.StrEnum):
    """Where a batch stands; derived from its counters, never stored."""

    OPEN = "open"
    CLOSED = "closed"
    CANCELLING = "cancelling"
    COMPLETE = "complete"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One line of the view `batch_progress`. submission: the sending that the expected count is of, where it has a name."""

    tenant: str
    batch_id: str
    state: BatchState
    expected: int | None
    submitted: int
    queued: int
    running: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    rejected: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    opened_at: datetime | None
    closed_at: datetime | None
    submission: str | None = None

    @property
    def done(self) -> int:
        """Jobs that will not change any more, rejected records included."""
        return self.succeeded + self.failed + self.cancelled + self.expired + self.rejected

    @property
    def total(self) -> int | None:
        """Records that have to end: those expected, or more where more have come; None until it is closed."""
        return None if self.expected is None else max(self.expected, self.submitted + self.rejected)

    @property
    def complete(self) -> bool:
        """Closed, every expected record is terminal or rejected, and no job is left."""
        return self.state is BatchState.COMPLETE

    @property
    def over(self) -> bool:
        """Complete, or cancelled before anything closed it, with no job left."""
        return self.state in (BatchState.COMPLETE, BatchState.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One line of the view `job_status`."""

    id: UUID
    tenant: str
    job_id: str | None
    batch_id: str | None
    custom_id: str | None
    pool: str
    tier: str
    model: str | None
    state: JobState
    run: int
    attempt: int
    deadline: datetime | None
    submitted_at: datetime
    finished_at: datetime | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error_code: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A terminal job's result: `body` is the encoded JobResult, `uri` where an answer too large for it is kept."""

    id: UUID
    run: int
    custom_id: str | None
    state: JobState
    body: bytes
    uri: str | None = None


@dataclass(frozen=True, slots=True)
class TierBacklog:
    """One line of the view `tier_backlog`. `oldest` is the minute in which the oldest queued job was submitted."""

    pool: str
    tier: str
    queued: int
    running: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, with the run that ended.

    bound_for: the only state that a next run of it could come to: `cancelled` where a cancel holds for it, `expired` where
    its deadline, or else its batch's, has passed. None where a worker would run it.
    """

    job: JobRow
    bound_for: JobState | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter's place on its topic, and the time of its record: a topic made again has other letters there."""

    topic: str
    partition: int
    offset: int
    written_at: datetime


def as_refused(outcome: OutcomeRow, reason: str) -> OutcomeRow:
    """The same job, ended as `failed: ledger_rejected`, with nothing in it that a worker made up."""
    job, code = outcome.job, ErrorCode.LEDGER_REJECTED
    message = f"Postgres refused the result: {reason}"
    body = JobResult(
        id=job.id,
        tenant=job.tenant,
        job_id=job.job_id,
        batch_id=job.batch_id,
        custom_id=job.custom_id,
        model=job.model,
        run=outcome.run,
        attempt=outcome.attempt,
        state=JobState.FAILED,
        error=JobError(code=code, message=message),
    ).encode()
    return replace(
        outcome,
        state=JobState.FAILED,
        body=body,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        error_code=code,
        error=message,
        uri=None,
        size=None,
        sha256=None,
    )
