"""How jobs end: the guarded write to the job table, then the results topic, then the record's release.

The table decides whose answer counts. What is published is what the table holds: our own answer where the write
changed the row, the stored one where somebody was first.
"""

import threading
import time
from collections.abc import Callable

from headrace.engine.text_engine import TextCompletion
from headrace.ledger import Finished, Ledger, OutcomeRow, StoredJob
from headrace.schemas import ErrorCode, JobError, JobResult, JobState
from headrace.store import open_store
from headrace.worker import job_log, translate
from headrace.worker.brake import Brake
from headrace.worker.bulk import BulkCall
from headrace.worker.config import WorkerConfig
from headrace.worker.dead_letters import dead_letter
from headrace.worker.held import Held
from headrace.worker.job import Job, Rejection, Stage, reject
from headrace.worker.metrics import Metrics
from headrace.worker.publisher import Publisher
from headrace.worker.results import LargeBody, dead_letter_reason, for_people, is_of, outcome, result_record

MOST_BYTES = 256 * 1024 * 1024  # of results that wait for the store, for Postgres or for Kafka

VERDICTS = {
    JobState.CANCELLED: JobError(code=ErrorCode.CANCELLED, message="the job or its batch was cancelled"),
    JobState.EXPIRED: JobError(
        code=ErrorCode.DEADLINE_EXCEEDED, message="the deadline passed before the job ended"
    ),
}


class Outcomes:
    """Takes jobs that have ended, and forgets them when Kafka has confirmed that it has their results.

    Args:
        look_up: asks the table about a job again, when a write found that it knows more than we did.
        wake: set when ``turn`` has something to do.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: str,
        ledger: Ledger,
        held: Held,
        metrics: Metrics,
        look_up: Callable[[Job], None],
        wake: threading.Event,
    ) -> None:
        self.brake = Brake(config.dead_letters)
        self._config, self._model, self._ledger = config, model, ledger
        self._held, self._metrics, self._look_up = held, metrics, look_up
        self._publisher = Publisher(config.producer())
        self._finishes = BulkCall("finish", self._call_finish, wake, meter=metrics.call("finish"))
        self._store = None if config.result_store is None else open_store(config.result_store)
        self._keeps = BulkCall("keep", self._call_keep, wake, most=1)
        self._cancelled = 0  # jobs that ended so in this turn
        self._unwritten_bytes = 0  # of results on their way to the store and to the table
        self._rejects = BulkCall("reject", self._call_reject, wake, meter=metrics.call("reject"))

    # --- ends -------------------------------------------------------------------------------------------------------

    def succeed(self, job: Job, done: TextCompletion) -> None:
        """The engine has answered."""
        assert job.request is not None
        self._metrics.answered(done)
        names = {"model": self._model, "worker": self._config.name}
        try:
            self._end(job, translate.succeeded(job.request, done, run=job.run, attempt=job.attempt, **names))
        except Exception as error:  # else the next worker computes the same answer, and dies of it too
            self.fail_by_defect(job, "writing down the answer", error)

    def fail(self, job: Job, error: JobError) -> None:
        """No retry will help."""
        self._end(job, self._unsuccessful(job, JobState.FAILED, error))

    def fail_by_defect(self, job: Job, doing: str, error: Exception) -> None:
        """A defect of ours, which must cost this job alone and not the worker."""
        job_log.defect(job, doing, error)
        message = f"{doing} failed with {type(error).__name__}"
        self.fail(job, JobError(code=ErrorCode.INTERNAL_ERROR, message=message))

    def end_as(self, job: Job, state: JobState) -> None:
        """The job is cancelled or expired."""
        self._end(job, self._unsuccessful(job, state, VERDICTS[state]))

    def reject(self, job: Job, code: ErrorCode, message: str, *, same_batch: bool = False) -> None:
        """No job after all: each of its records is rejected at its own place. same_batch: see `RejectionRow`."""
        row = job.row
        for delivery in self._held.drop(job):
            whose = row.tenant, row.batch_id, row.custom_id
            self.reject_record(reject(delivery, code, message, *whose, same_batch))

    def reject_record(self, rejection: Rejection) -> None:
        """The record is no job."""
        self._metrics.died(rejection.row.code)
        job_log.rejected(rejection)
        if rejection.row.code != ErrorCode.DUPLICATE_JOB_ID:  # that cost nothing, and says nothing of us
            self.brake.note(dead=True, now=time.monotonic())
        self._rejects.put([rejection])

    def publish_stored(self, job: Job, stored: StoredJob) -> None:
        """The job had ended before: only its publish may be missing."""
        if stored.result is None:  # its day has been dropped from the table meanwhile
            self._held.forget(job)
            return
        job.dead_letter = dead_letter_reason(stored.result) if stored.state is JobState.FAILED else None
        self._publish(job, stored.result)

    # --- on their way -----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Write what has been kept, publish what has been written, and release what has been published."""
        for ((job, row, large),), _ in self._keeps.results():
            self._unwritten_bytes -= len(large.body)
            self._finishes.put([(job, row)])
        for ended, finished in self._finishes.results():
            for job, row in ended:
                self._unwritten_bytes -= len(row.body)
                self._note_written(job, row, finished)
        if self._cancelled:
            job_log.cancelled(self._cancelled)
            self._cancelled = 0
        for rejections, _ in self._rejects.results():
            for rejection in rejections:
                self._publish_rejection(rejection)
        for publication in self._publisher.confirmed():
            self._metrics.published(publication.form)
            self._note_confirmed(publication.about)

    @property
    def idle(self) -> bool:
        """Everything that has ended is in the table and on the topic."""
        calls = (self._keeps, self._finishes, self._rejects)
        return all(call.idle for call in calls) and not self._publisher.unconfirmed

    @property
    def writing(self) -> int:
        """Results that Postgres does not have yet."""
        return self._keeps.pending + self._finishes.pending

    @property
    def full(self) -> bool:
        """Whether so much waits that no more results should be made."""
        return self._unwritten_bytes + self._publisher.unconfirmed_bytes > MOST_BYTES

    @property
    def unpublished_full(self) -> bool:
        """Whether so much waits for Kafka that no more stored results should be looked up."""
        return self._publisher.unconfirmed_bytes > MOST_BYTES

    @property
    def unconfirmed(self) -> int:
        """Records that Kafka has not confirmed yet."""
        return self._publisher.unconfirmed

    def give_up_keeping(self) -> list[Job]:
        """Ask no more of the results store; return the jobs whose results it does not have."""
        return [job for job, _, _ in self._keeps.give_up()]

    def close(self) -> None:
        """Forget what is on its way; its offsets are not committed, so it comes again."""
        self._keeps.close()
        self._finishes.close()
        self._rejects.close()
        self._publisher.close()

    def _end(self, job: Job, result: JobResult) -> None:
        row, large = outcome(job, result, self._config.max_result_bytes, self._store)
        job.stage = Stage.ENDING  # from here on nothing else can happen to it
        job.dead_letter = for_people(result.error)
        if job.dead_letter is not None:
            self._metrics.died(job.dead_letter.code)
        self.brake.note(dead=job.dead_letter is not None, now=time.monotonic())
        self._unwritten_bytes += len(row.body)
        if large is None:
            self._finishes.put([(job, row)])
        else:  # a row never refers to what is not there
            self._unwritten_bytes += len(large.body)
            self._keeps.put([(job, row, large)])

    def _unsuccessful(self, job: Job, state: JobState, error: JobError) -> JobResult:
        return translate.unsuccessful(
            job.envelope,
            state,
            error,
            job=job.request,
            worker=self._config.name,
            run=job.run,
            attempt=job.attempt,
        )

    def _call_keep(self, results: list[tuple[Job, OutcomeRow, LargeBody]]) -> None:
        assert self._store is not None
        for _, _, large in results:
            self._store.write(large.name, large.body)

    def _call_finish(self, ended: list[tuple[Job, OutcomeRow]]) -> Finished:
        return self._ledger.finish([row for _, row in ended])

    def _call_reject(self, rejections: list[Rejection]) -> None:
        self._ledger.reject([rejection.row for rejection in rejections])

    def _note_written(self, job: Job, row: OutcomeRow, finished: Finished) -> None:
        id = job.row.id
        if id in finished.changed:
            self._note_ended(job, row.state, row.error_code)
            self._publish(job, row.body)
        elif (winner := finished.winners.get(id)) is not None:
            if id in finished.refused:
                self._note_ended(job, JobState.FAILED, ErrorCode.LEDGER_REJECTED)
            elif is_of(
                winner, self._config.name, row.attempt
            ):  # written by an earlier try, which was not heard of
                self._note_ended(job, row.state, row.error_code)
            # Not ours any more: replaying the letter of a job that was answered elsewhere would run it again.
            job.dead_letter = dead_letter_reason(winner)
            self._publish(job, winner)
        elif id in finished.refused:
            self.reject(job, ErrorCode.LEDGER_REJECTED, finished.refused[id])
        else:  # other content, or a later run: the table decides anew
            self._look_up(job)

    def _note_ended(self, job: Job, state: JobState, code: str | None) -> None:
        self._metrics.ended(job, state, code)
        job_log.ended(job, state, code)
        self._cancelled += state is JobState.CANCELLED

    def _publish(self, job: Job, body: bytes) -> None:
        job.stage = Stage.ENDING
        job.unconfirmed = 1
        self._publisher.put(result_record(self._config.topics.results, job, body))
        if job.dead_letter is not None:
            job.unconfirmed += 1
            why, record = job.dead_letter, job.deliveries[0]
            self._publisher.put(
                dead_letter(self._config.topics.dead, record, job.row, job.run, why.code, why.message, job)
            )

    def _publish_rejection(self, rejection: Rejection) -> None:
        row, record = rejection.row, rejection.delivery
        self._publisher.put(
            dead_letter(self._config.topics.dead, record, row, row.run, row.code, row.message, rejection)
        )

    def _note_confirmed(self, about: Job | Rejection) -> None:
        if isinstance(about, Rejection):
            self._held.release(about.delivery)
            return
        about.unconfirmed -= 1
        if about.unconfirmed == 0:
            self._held.forget(about)
