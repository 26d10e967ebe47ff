"""The job table's face: every write and question that the rest of Headrace has for Postgres."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self
from uuid import UUID

from headrace.ledger.rows import (
    AttemptRow,
    BatchProgress,
    Finished,
    JobRow,
    JobStatus,
    OutcomeRow,
    RejectionRow,
    StoredJob,
    StoredResult,
    TierBacklog,
)
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, CancelJob


class Ledger:
    """A pool of connections to the job table.

    Synchronous and safe to share between threads. Each call is one transaction, retried whole while Postgres is
    away, up to `retry_for` seconds; then LedgerUnavailable. All writes are safe to repeat.

    Args:
        url: `postgresql://user:password@host:port/database`, with any libpq parameter (`sslmode` ...).
        pool_size: connections at most; a call beyond them waits.
        retry_for: seconds for which a call keeps trying after a lost connection or a deadlock.
    """

    def __init__(self, url: str, *, pool_size: int = 4, retry_for: float = 10.0) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give back every connection."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the recorder's writes ---------------------------------------------------------------------------------

    def record(self, jobs: Sequence[JobRow], rejections: Sequence[RejectionRow] = ()) -> int:
        """Insert jobs that are not there yet as `queued`, and rejections; return how many jobs were new.

        The same id twice, here or in the table, with the same content is one job; with other content it becomes a
        rejection (`duplicate_job_id`) at its own source. Ids outside the days kept, and rows that Postgres refuses,
        become rejections too.
        """
        raise NotImplementedError

    def reject(self, rejections: Sequence[RejectionRow]) -> int:
        """Insert rejections that are not there yet, count them against their batches, return how many were new."""
        raise NotImplementedError

    def apply_control(self, messages: Sequence[BatchOpened | BatchClosed | CancelJob | CancelBatch]) -> None:
        """Open and close batches, and note cancels; in any order, any number of times.

        A cancel changes no job's row: the worker that holds or meets the job ends it (`lookup`, `pending_cancels`).
        """
        raise NotImplementedError

    # --- a worker's walk ---------------------------------------------------------------------------------------

    def keeps(self, id: UUID) -> bool:
        """Whether the table has a partition for this id; if not, reject it (`job_id_out_of_range`). No round trip."""
        raise NotImplementedError

    def lookup(self, jobs: Sequence[JobRow], worker: str) -> dict[UUID, StoredJob]:
        """Say what the table holds for each id, absent ones included (state None; a cancel may still be there).

        `worker` is the asker: its own open attempts are not "elsewhere", and count as dead (ask only about jobs
        that you do not hold).
        """
        raise NotImplementedError

    def begin(self, attempts: Sequence[AttemptRow]) -> set[UUID]:
        """Open attempts and make their jobs `running`; return the ids that the caller may now run.

        Left out are jobs that are terminal, of other content or of another run, and those whose attempt number
        somebody else took first: look those up again. Jobs without a row get one.
        """
        raise NotImplementedError

    def finish(self, outcomes: Sequence[OutcomeRow]) -> Finished:
        """Make jobs terminal, keep their results, end their attempts and count them, in one transaction.

        Insert the job if the recorder has not yet; change it only if its run and content are these and it is not
        terminal. A row that Postgres refuses ends as `failed: ledger_rejected` while the others land.
        """
        raise NotImplementedError

    def end_attempts(self, worker: str, ids: Collection[UUID], *, died: bool = False) -> None:
        """End this worker's open attempts at `ids` without an outcome.

        Plainly at a clean stop; with `died=True` when the engine died under them, which makes them suspects while
        the worker lives on. The jobs stay `running` until the next attempt.
        """
        raise NotImplementedError

    def heartbeat(self, worker: str, pool: str, model: str, ttl: float) -> None:
        """Say that this worker is alive for `ttl` seconds more. `worker` must be unique to the process's life."""
        raise NotImplementedError

    def leave(self, worker: str) -> None:
        """End the worker's heartbeat now, at a clean stop."""
        raise NotImplementedError

    def pending_cancels(self, ids: Collection[UUID]) -> set[UUID]:
        """Which of these jobs (those held, they have rows) are cancelled and not terminal."""
        raise NotImplementedError

    # --- questions ---------------------------------------------------------------------------------------------

    def job(self, id: UUID) -> JobStatus | None:
        """One job's line of `job_status`."""
        raise NotImplementedError

    def result(self, id: UUID) -> StoredResult | None:
        """The result of a job's current run, once it is terminal."""
        raise NotImplementedError

    def batch(self, tenant: str, batch_id: str) -> BatchProgress | None:
        """One batch's line of `batch_progress`; None if nothing at all is known of it."""
        raise NotImplementedError

    def results(self, tenant: str, batch_id: str, after: UUID | None = None) -> Iterator[StoredResult]:
        """The batch's results in id order, read in pages; `after` resumes behind an id already read."""
        raise NotImplementedError

    def rejections(self, tenant: str, batch_id: str) -> list[RejectionRow]:
        """The batch's rejected records in source order."""
        raise NotImplementedError

    def backlog(self) -> list[TierBacklog]:
        """What waits and runs, for each pool and tier."""
        raise NotImplementedError

    # --- upkeep ------------------------------------------------------------------------------------------------

    def ensure_partitions(self, days_ahead: int = 7, days_behind: int = 7) -> int:
        """Make the day partitions around today that are missing; return how many were made."""
        raise NotImplementedError

    def retire(self, keep: timedelta) -> list[str]:
        """Drop day partitions that ended longer than `keep` ago and hold no live row; return their names."""
        raise NotImplementedError
