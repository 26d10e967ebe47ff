"""Attempts: written before a job is in the engine, ended when it comes out.

An attempt that never ends tells of a death, so one that is given up in good order (a retry, a clean stop) is ended
without an outcome, and one whose engine died is marked so. So is one that failed: those alone count as tries.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from headrace.engine.errors import EngineDead
from headrace.engine.text_engine import TextCompletion, TextRequest
from headrace.ledger import AttemptRow, Begun, Ledger
from headrace.schemas import ErrorCode, JobState
from headrace.worker import job_log
from headrace.worker.bulk import BulkCall
from headrace.worker.job import Job, Stage
from headrace.worker.metrics import Metrics
from headrace.worker.outcomes import Outcomes
from headrace.worker.retries import retry_for
from headrace.worker.running import Running
from headrace.worker.translate import to_error, to_request


class Returned(NamedTuple):
    """A job whose attempt ends without an outcome: as one that died or failed, or plainly. It is parked until a time."""

    job: Job
    died: bool
    failed: bool
    until: float


class Attempts:
    """The jobs in flight: those with an open attempt of this worker, from its row to its end.

    Args:
        rank: a job's rank, the engine's priority (0 is the highest).
        release: told of each job that is in flight no more.
        look_up: asks the table about a job again.
        park: lets a job wait until a time.
        wake: set when ``turn`` has something to do.
    """

    def __init__(
        self,
        worker: str,
        running: Running,
        ledger: Ledger,
        outcomes: Outcomes,
        metrics: Metrics,
        *,
        rank: Callable[[Job], int],
        release: Callable[[Job], None],
        look_up: Callable[[Job], None],
        park: Callable[[Job, float], None],
        wake: threading.Event,
    ) -> None:
        self._worker, self._running, self._ledger, self._outcomes = worker, running, ledger, outcomes
        self._metrics = metrics
        self._rank, self._release = rank, release
        self._look_up, self._park, self._wake = look_up, park, wake
        self._in_flight: dict[UUID, Job] = {}
        self._begun: list[Job] = []  # for the engine to take
        self._stopped: list[Job] = []  # for the engine to abort
        self._giving_back = False  # the engine takes nothing more
        self._begins = BulkCall("begin", self._call_begin, wake, meter=metrics.call("begin"))
        self._returns = BulkCall(
            "end attempts", self._call_end_attempts, wake, meter=metrics.call("end attempts")
        )

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, jobs: Iterable[Job], group_size: int = 0) -> None:
        """Write an attempt for each, then run it. group_size: of suspects that run with nobody else."""
        begun = []
        for job in jobs:
            job.stage = Stage.STARTING
            self._in_flight[job.row.id] = job
            begun.append((job, AttemptRow(job.row, self._worker, job.attempt + 1, job.run, group_size)))
        if begun:
            self._begins.put(begun)

    def stop(self, job: Job) -> None:
        """End a running job as its verdict says."""
        self._stopped.append(job)

    def turn(self, now: float, wait: float) -> None:
        """Start what has begun, and see to what has ended, waiting up to ``wait`` seconds for it."""
        for begun, answer in self._begins.results():
            self._note_begun(begun, answer)
        if self._giving_back:
            self._give_back_begun()
        else:
            self._running.reopen()
        self._end_begun(now)
        if self._running.ready:
            self._drive_engine(now, wait)
        for returned, _ in self._returns.results():
            for job, _, _, until in returned:
                self._leave(job)
                if job.verdict is None:
                    self._park(job, until)
                else:  # cancelled or expired meanwhile: it waits for nothing
                    self._look_up(job)

    def give_back(self) -> None:
        """Stop everything that runs or is about to; ``turn`` then ends the attempts without an outcome."""
        self._giving_back = True
        try:
            self._running.abort_all()
        except EngineDead as death:
            self._return(self._running.bury(death), died=True)
        self._give_back_begun()

    def give_back_ended(self, jobs: Sequence[Job]) -> None:
        """These have left the engine, but their results cannot be written down: end their attempts likewise."""
        self._in_flight.update((job.row.id, job) for job in jobs)
        self._return(jobs)

    def _give_back_begun(self) -> None:
        self._return(self._begun)
        self._begun.clear()

    def close(self) -> None:
        """Let the engine go. What is still in flight counts as dead once this worker's heartbeat ends."""
        self._begins.close()
        self._returns.close()
        self._running.close()

    def _leave(self, job: Job) -> None:
        del self._in_flight[job.row.id]
        self._release(job)

    # --- before the engine ------------------------------------------------------------------------------------------

    def _call_begin(self, begun: list[tuple[Job, AttemptRow]]) -> Begun:
        return self._ledger.begin([attempt for _, attempt in begun])

    def _note_begun(self, begun: list[tuple[Job, AttemptRow]], answer: Begun) -> None:
        for job, attempt in begun:
            id = job.row.id
            if id in answer:
                job.attempt = attempt.attempt
                self._metrics.started(job)
                self._begun.append(job)
                continue
            self._leave(job)
            if id in answer.refused:
                self._outcomes.reject(job, ErrorCode.LEDGER_REJECTED, answer.refused[id])
            else:  # somebody was quicker: the table knows more now
                self._look_up(job)

    def _end_begun(self, now: float) -> None:
        """End what is cancelled or expired before the engine has it: a new engine may be minutes away, or never come."""
        begun, self._begun = self._begun, []
        for job in begun:
            if job.verdict is None and job.expired(now):
                job.verdict = JobState.EXPIRED
            if job.verdict is None:
                self._begun.append(job)
            else:
                self._leave(job)
                self._outcomes.end_as(job, job.verdict)

    # --- in the engine ----------------------------------------------------------------------------------------------

    def _drive_engine(self, now: float, wait: float) -> None:
        try:
            self._start()
            if self._stopped:
                stopped, self._stopped = self._stopped, []
                self._running.abort(stopped)
            ended = self._running.collect(wait)
        except EngineDead as death:
            self._metrics.engine_died()
            self._return(self._running.bury(death), died=True)
            return
        for job, completion in ended:
            self._conclude(job, completion, now)

    def _start(self) -> None:
        begun, self._begun = self._begun, []
        start = [(job, request) for job in begun if (request := self._request(job)) is not None]
        if start:
            self._running.start(start)

    def _request(self, job: Job) -> TextRequest | None:
        """What the engine is asked. None where a defect of ours ends the job, or the worker would meet it for ever."""
        try:
            assert job.request is not None  # a job that could not be read never comes this far
            return to_request(job.request, str(job.row.id), self._rank(job), job.deadline_s)
        except Exception as error:
            self._leave(job)
            self._outcomes.fail_by_defect(job, "putting the job to the engine", error)
            return None

    # --- after the engine -------------------------------------------------------------------------------------------

    def _conclude(self, job: Job, done: TextCompletion, now: float) -> None:
        failures = job.failures + 1
        retry = None if done.error is None else retry_for(done.error.code, failures)
        if job.verdict is None and done.aborted:
            self._return([job])
            return
        if job.verdict is None and retry is not None and done.error is not None:
            wait_s = retry.wait_s(failures)
            self._metrics.retried(done.error.code)
            job_log.retried(job, done.error.code, wait_s)
            self._return([job], failed=True, until=now + wait_s)
            return
        self._leave(job)
        if job.verdict is not None and (done.aborted or done.error is not None):
            self._outcomes.end_as(job, job.verdict)
        elif done.error is not None:
            self._outcomes.fail(job, to_error(done.error, job.request))
        else:
            self._outcomes.succeed(job, done)

    def _return(
        self, jobs: Iterable[Job], *, died: bool = False, failed: bool = False, until: float = 0.0
    ) -> None:
        """End attempts without an outcome; their jobs are then parked until they are due."""
        returned = []
        for job in jobs:
            job.stage = Stage.ARRIVED
            returned.append(Returned(job, died, failed, until))
        if returned:
            self._returns.put(returned)

    def _call_end_attempts(self, returned: list[Returned]) -> None:
        for died, failed in sorted({(each.died, each.failed) for each in returned}):
            ids = [each.job.row.id for each in returned if (each.died, each.failed) == (died, failed)]
            self._ledger.end_attempts(self._worker, ids, died=died, failed=failed)
