"""The job table's face: every write and question that the rest of Headrace has for Postgres."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from itertools import islice
from types import TracebackType
from typing import Self
from uuid import UUID

from headrace.ledger import batches, letters, partitions, queries, workers
from headrace.ledger.attempts import begin, begin_absent, end
from headrace.ledger.database import Database
from headrace.ledger.errors import RowRefused
from headrace.ledger.finish import finish, finish_absent
from headrace.ledger.lookup import lookup
from headrace.ledger.record import cleaned, record, reject, rejection
from headrace.ledger.reopen import reopen
from headrace.ledger.retention import drain, retire
from headrace.ledger.rows import (
    AttemptRow,
    BatchProgress,
    Begun,
    EndedJob,
    Finished,
    JobRow,
    JobStatus,
    Letter,
    OutcomeRow,
    RejectionRow,
    StoredJob,
    StoredResult,
    TierBacklog,
    as_refused,
)
from headrace.ledger.staging import bisect, first_by
from headrace.schemas import ControlMessage, ErrorCode, JobState

log = logging.getLogger(__name__)


class Ledger:
    """A pool of connections to the job table.

    Synchronous and safe to share between threads. A call is one transaction or a few, each retried whole while Postgres
    is away, up to `retry_for` seconds; then LedgerUnavailable. All writes are safe to repeat.

    Args:
        url: `postgresql://user:password@host:port/database`, with any libpq parameter (`sslmode` ...).
        pool_size: connections at most; a call beyond them waits. One more, opened at the first heartbeat, is kept for
            heartbeats: a worker whose other calls are slow must not be taken for dead.
        retry_for: seconds for which a call keeps trying after a lost connection or a deadlock.
    """

    def __init__(self, url: str, *, pool_size: int = 4, retry_for: float = 10.0) -> None:
        self._database = Database(url, pool_size, retry_for)
        self._run = self._database.transaction
        self._heartbeats = Database(url, 1, retry_for)
        self._days: frozenset[date] = frozenset()

    def close(self) -> None:
        """Give back every connection."""
        self._database.close()
        self._heartbeats.close()

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
        unwanted = [_out_of_range(job) for job in jobs if not self.keeps(job.id)]
        wanted = [job for job in jobs if self.keeps(job.id)] if unwanted else jobs

        def refused(job: JobRow, reason: str) -> int:
            unwanted.append(rejection(job, ErrorCode.LEDGER_REJECTED, reason))
            return 0

        new = 0
        while wanted:
            unique = first_by(_id_of, wanted)
            new += sum(bisect(lambda part: self._run(record, part), unique, refused))
            # One id twice in one call: what differs from the first is held against what the table now has.
            first = {job.id: job.content_sha for job in unique} if len(unique) < len(wanted) else {}
            wanted = [job for job in wanted if job.content_sha != first.get(job.id, job.content_sha)]
        self.reject([*rejections, *unwanted])
        self.reopen([job for job in jobs if job.run > 1])
        return new

    def reject(self, rejections: Sequence[RejectionRow]) -> int:
        """Insert rejections that are not there yet, count them against their batches, return how many were new."""

        def refused(row: RejectionRow, reason: str) -> int:
            place = f"{row.src_topic}/{row.src_partition}/{row.src_offset}"
            log.error("the rejection (%s) of %s could not be stored: %s", row.code, place, reason)
            return 0

        rows = [cleaned(row) for row in rejections]
        return sum(bisect(lambda part: self._run(reject, part), rows, refused))

    def reopen(self, rows: Sequence[JobRow | RejectionRow]) -> int:
        """Open ended jobs, and take back rejections, for the run that the rows ask for; return how many did.

        A job is opened if it is terminal in the run before and has this content: then it is `queued` in this run, its
        attempts start at 1 again, and the counters take back how it ended. Whatever else a row may find is left as it
        is, so saying it twice does no harm.
        """
        return self._run(reopen, first_by(_place_of, rows)) if rows else 0

    def apply_control(self, messages: Sequence[ControlMessage]) -> None:
        """Open and close batches, and note cancels; in any order, any number of times.

        A cancel changes no job's row: the worker that holds or meets the job ends it (see `lookup`). A message that
        Postgres refuses is left out, and the log says so.
        """

        def refused(message: ControlMessage, reason: str) -> None:
            log.error(
                "a control message of tenant %s (%s) could not be stored: %s",
                message.tenant,
                message.type,
                reason,
            )

        bisect(lambda part: self._run(batches.apply, part), messages, refused)

    # --- a worker's walk ---------------------------------------------------------------------------------------

    def keeps(self, id: UUID) -> bool:
        """Whether the table has a partition for this id; if not, reject it (`job_id_out_of_range`). No round trip."""
        day = partitions.day_of(id)
        if not self._days:
            self._days = self._run(partitions.existing)
        if day is None or day in self._days:
            return True
        if not partitions.within_reach(day):
            return False
        # A day not seen yet: an old one, or one that another process made.
        self._run(partitions.ensure, [day])
        self._days = self._run(partitions.existing)
        return True

    def lookup(self, jobs: Sequence[JobRow], worker: str) -> dict[UUID, StoredJob]:
        """Say what the table holds for each id, absent ones included (state None; a cancel may still be there).

        `worker` is the asker: its own open attempts are not "elsewhere", and count as dead (ask only about jobs
        that you do not hold).
        """
        unique = first_by(_id_of, jobs)
        return self._run(lookup, unique, worker) if unique else {}

    def begin(self, attempts: Sequence[AttemptRow]) -> Begun:
        """Open attempts and make their jobs `running`; say which ids the caller may now run.

        Left out are jobs that are terminal, of other content or of another run, and those whose attempt number
        somebody else took first: look those up again. Jobs without a row get one. Name each id once.
        """
        refused: dict[UUID, str] = {}

        def refuse(row: AttemptRow, reason: str) -> set[UUID]:
            refused[row.job.id] = reason
            return set()

        unique = first_by(lambda row: row.job.id, attempts)
        for row in unique:
            self.keeps(row.job.id)  # makes the partition of an old day
        started = set().union(*bisect(lambda part: self._run(begin, part), unique, refuse))
        # The recorder is mostly ahead, so next to none is left.
        left = [row for row in unique if row.job.id not in started and row.job.id not in refused]
        started.update(*bisect(lambda part: self._run(begin_absent, part), left, refuse))
        return Begun(frozenset(started), refused)

    def finish(self, outcomes: Sequence[OutcomeRow]) -> Finished:
        """Make jobs terminal, keep their results, end their attempts and count them: each job in one transaction.

        Insert the job if the recorder has not yet; change it only if its run and content are these and it is not
        terminal. A row that Postgres refuses ends as `failed: ledger_rejected` while the others land. Name each id
        once; of several, the first counts.
        """

        def refuse(row: OutcomeRow, reason: str) -> Finished:
            failed = [as_refused(row, reason)]
            try:
                done = self._run(finish, failed)
                if not done.changed:
                    done = self._run(finish_absent, failed)
            except RowRefused:
                return Finished(refused={row.job.id: reason})
            stored = dict.fromkeys(done.changed, failed[0].body)
            return Finished(winners={**done.winners, **stored}, refused={row.job.id: reason})

        unique = first_by(lambda row: row.job.id, outcomes)
        for row in unique:
            self.keeps(row.job.id)
        done = _merged(bisect(lambda part: self._run(finish, part), unique, refuse))
        # Whatever ran has a row, so what is left had mostly ended before.
        left = [row for row in unique if row.job.id not in done.changed and row.job.id not in done.refused]
        return _merged([done, *bisect(lambda part: self._run(finish_absent, part), left, refuse)])

    def end_attempts(
        self, worker: str, ids: Collection[UUID], *, died: bool = False, failed: bool = False
    ) -> None:
        """End this worker's open attempts at `ids` without an outcome.

        Plainly at a clean stop; with `died=True` when the engine died under them, which makes them suspects while
        the worker lives on; with `failed=True` when they failed and are tried again, which `lookup` counts. The jobs
        stay `running` until the next attempt.
        """
        if ids:
            self._run(end, worker, ids, died, failed)

    def heartbeat(self, worker: str, pool: str, model: str, ttl: float) -> None:
        """Say that this worker is alive for `ttl` seconds more. `worker` must be unique to the process's life."""
        self._heartbeats.transaction(workers.heartbeat, worker, pool, model, ttl)

    def leave(self, worker: str) -> None:
        """End the worker's heartbeat now, at a clean stop."""
        self._heartbeats.transaction(workers.leave, worker)

    # --- questions ---------------------------------------------------------------------------------------------

    def job(self, id: UUID) -> JobStatus | None:
        """One job's line of `job_status`."""
        return self._run(queries.job, id)

    def result(self, id: UUID) -> StoredResult | None:
        """The result of a job's current run, once it is terminal."""
        return self._run(queries.result, id)

    def batch(self, tenant: str, batch_id: str) -> BatchProgress | None:
        """One batch's line of `batch_progress`; None if nothing at all is known of it."""
        return self._run(queries.batch, tenant, batch_id)

    def has_batch(self, batch_id: str) -> bool:
        """Whether any tenant has a batch of this name."""
        return self._run(queries.has_batch, batch_id)

    def results(
        self, tenant: str, batch_id: str, after: UUID | None = None, run: int | None = None
    ) -> Iterator[StoredResult]:
        """The batch's results in id order, read in pages; `after` resumes behind an id already read.

        run: those of this run, also where a later one has been asked for; None for each job's current run.
        """
        while page := self._page(tenant, batch_id, run, after):
            yield from page
            after = page[-1].id

    def has_run(self, tenant: str, batch_id: str, run: int) -> bool:
        """Whether any job of the batch has come to this run, of whatever size; it need not have ended in it."""
        return self._run(queries.has_run, tenant, batch_id, run)

    def ended(self, tenant: str, batch_id: str, states: Collection[JobState]) -> Iterator[list[EndedJob]]:
        """The batch's jobs that ended in these states, in pages, in id order: each with what a next run could come to."""
        after: UUID | None = None
        while page := self._run(queries.ended_page, tenant, batch_id, states, after):
            yield page
            after = page[-1].job.id

    def bound_for(self, rows: Sequence[JobRow | RejectionRow]) -> dict[JobRow | RejectionRow, JobState]:
        """Of records to be sent again, the jobs that no worker would run, each with the state that alone it could come to."""
        return self._run(queries.bound_for, rows)

    def is_cancelled(self, tenant: str, batch_id: str) -> bool:
        """Whether a cancel of the batch has come: what is sent under it ends as cancelled."""
        return self._run(queries.is_cancelled, tenant, batch_id)

    def other_content(self, sent: Mapping[UUID, bytes]) -> dict[UUID, str | None]:
        """Of jobs that were sent, by id with their contents, those whose id is another content's; each with its batch."""
        found: dict[UUID, str | None] = {}
        items = iter(sent.items())
        while part := list(islice(items, queries.SENT_PAGE)):
            found.update(self._run(queries.other_content, part))
        return found

    def rejections(self, tenant: str, batch_id: str) -> list[RejectionRow]:
        """The batch's rejected records in source order."""
        return self._run(queries.rejections, tenant, batch_id)

    def backlog(self) -> list[TierBacklog]:
        """What waits and runs, for each pool and tier."""
        return self._run(queries.backlog)

    # --- dead letters ------------------------------------------------------------------------------------------

    def settle(self, dead: Collection[Letter], how: str) -> None:
        """Note that these dead letters are dealt with: `replayed` or `dropped`. A dropped one may still be replayed."""
        if dead:
            self._run(letters.settle, dead, how)

    def settled(self, topic: str) -> dict[Letter, str]:
        """The dead letters of a topic that are dealt with, and how."""
        return self._run(letters.settled, topic)

    # --- upkeep ------------------------------------------------------------------------------------------------

    def ensure_partitions(self, days_ahead: int = partitions.AHEAD, days_behind: int = 1) -> int:
        """Make the day partitions around today that are missing; return how many were made."""
        days = [partitions.today() + timedelta(days=n) for n in range(-days_behind, days_ahead + 1)]
        made = self._run(partitions.ensure, days)
        self._days = self._run(partitions.existing)
        return made

    def retire(self, keep: timedelta) -> list[str]:
        """Drop day partitions that ended longer than `keep` ago and hold no live row; return their names.

        Forgets what else is as old, batches of which no job is left among it.
        """
        return retire(self._database, keep)

    def drain(self) -> None:
        """Forget the minutes of `tier_backlog` in which nothing is left to do."""
        self._database.once(drain)

    def _page(self, tenant: str, batch_id: str, run: int | None, after: UUID | None) -> list[StoredResult]:
        return self._run(queries.results_page, tenant, batch_id, run, after)


def _id_of(job: JobRow) -> UUID:
    return job.id


def _place_of(row: JobRow | RejectionRow) -> Hashable:
    return row.id if isinstance(row, JobRow) else (row.src_topic, row.src_partition, row.src_offset)


def _out_of_range(job: JobRow) -> RejectionRow:
    return rejection(job, ErrorCode.JOB_ID_OUT_OF_RANGE, f"the table keeps no day that {job.id} could be of")


def _merged(parts: Sequence[Finished]) -> Finished:
    if len(parts) == 1:
        return parts[0]
    return Finished(
        frozenset().union(*(part.changed for part in parts)),
        {id: body for part in parts for id, body in part.winners.items()},
        {id: reason for part in parts for id, reason in part.refused.items()},
    )
