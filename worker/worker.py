"""The worker: Kafka in, engine, job table and Kafka out.

One thread, the one that calls ``Worker.run``, owns every job and the engine. The others only carry: a consumer for
each tier brings records and commits offsets, bulk calls talk to Postgres, the producer talks to Kafka. ``_turn`` says
what happens to one record, in order.

Three rules make it safe to kill at any moment: a job's attempt is in the table before the job is in the engine; its
result is in the table before it is on the results topic; its offset is committed only after Kafka has confirmed the
result.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from uuid import UUID

from headrace.engine.errors import EngineDead
from headrace.engine.request import FinishReason
from headrace.engine.text import TextCompletion, TextEngine
from headrace.ledger import AttemptRow, Begun, Finished, Ledger, OutcomeRow, StoredJob
from headrace.schemas import ErrorCode, JobError, JobResult, JobState
from headrace.worker import suspects
from headrace.worker.admission import Admission
from headrace.worker.attempts import Attempts
from headrace.worker.bulk import BulkCall
from headrace.worker.config import WorkerConfig
from headrace.worker.consumer import Delivery, TierConsumer
from headrace.worker.control import Cancel, Cancels, ControlConsumer
from headrace.worker.dead_letters import dead_letter
from headrace.worker.health import HealthServer, Status
from headrace.worker.heartbeat import Heartbeat
from headrace.worker.job import Job, Rejection, Stage, read, reject
from headrace.worker.publisher import Publisher
from headrace.worker.results import dead_letter_reason, outcome, result_record
from headrace.worker.retries import retry_for
from headrace.worker.timetable import Timetable
from headrace.worker.translate import succeeded, to_error, unsuccessful

log = logging.getLogger(__name__)

ARRIVALS_A_TURN = 256  # reading more at once would keep the engine's answers waiting
ENGINE_WAIT_S = 0.005
PUBLISH_WAIT_S = 0.005
IDLE_WAIT_S = 0.05
STATUS_EVERY_S = 0.5
LOOK_AGAIN_S = 1.0  # at a job that another worker runs
FLUSH_S = 20.0  # at the end, for what is finished
CLOSE_S = 15.0  # for a consumer to commit and leave

VERDICTS = {
    JobState.CANCELLED: JobError(code=ErrorCode.CANCELLED, message="the job or its batch was cancelled"),
    JobState.EXPIRED: JobError(
        code=ErrorCode.DEADLINE_EXCEEDED, message="the deadline passed before the job ended"
    ),
}
ENGINE_KILLER = JobError(
    code=ErrorCode.ENGINE_FAILURE, message="the engine died again and again while it ran this job alone"
)


class Worker:
    """Takes jobs from Kafka and ends each of them: once in the table, at least once on the results topic.

    Args:
        open_engine: builds an engine; called again when it has died.
        ledger: the job table.
    """

    def __init__(self, config: WorkerConfig, open_engine: Callable[[], TextEngine], ledger: Ledger) -> None:
        self._config, self._ledger = config, ledger
        self._wake = threading.Event()
        self._draining = False
        self._attempts = Attempts(open_engine)
        self._models = frozenset({self._attempts.model, *config.model_names})

        self._jobs: dict[UUID, Job] = {}  # all that this worker holds
        self._in_flight: dict[UUID, Job] = {}  # those with an open attempt of ours
        self._ready: list[Job] = []  # begun, for the engine to take
        self._stopped: list[Job] = []  # running, to be aborted
        self._admission: Admission[Job] = Admission(config.tiers)
        self._suspects = suspects.Suspects()
        self._apart = False  # what is in flight is a group of suspects
        self._parked: Timetable[Job] = Timetable(lambda job: job.stage is Stage.PARKED)
        self._deadlines: Timetable[Job] = Timetable(lambda job: job.stage is not Stage.GONE)
        self._cancels = Cancels()

        self._arrivals: dict[str, deque[Delivery]] = {tier.name: deque() for tier in config.tiers}
        self._cancel_inbox: deque[Cancel] = deque()
        self._consumers = {
            tier.name: TierConsumer(
                config.consumer(tier.name),
                config.topics.jobs(tier.name),
                tier.name,
                prefetch=tier.prefetch,
                max_bytes=config.max_held_bytes,
                inbox=self._arrivals[tier.name],
                wake=self._wake,
            )
            for tier in config.tiers
        }
        self._revokes = 0
        control = {"group.id": f"{config.topics.prefix}.control.{config.name}", **config.client()}
        self._control = ControlConsumer(control, config.topics.control, self._cancel_inbox, self._wake)
        self._publisher = Publisher(config.client())

        self._lookups = BulkCall("lookup", self._call_lookup, self._wake)
        self._begins = BulkCall("begin", self._call_begin, self._wake)
        self._finishes = BulkCall("finish", self._call_finish, self._wake)
        self._rejects = BulkCall("reject", self._call_reject, self._wake)
        self._returns = BulkCall("end attempts", self._call_end_attempts, self._wake)
        self._calls = (self._lookups, self._begins, self._finishes, self._rejects, self._returns)
        self._heartbeat = Heartbeat(ledger, config.name, config.pool, self._attempts.model, config.alive_s)
        self._status = self._take_status()
        self._health: HealthServer | None = None

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set, then stop cleanly. Raises what no retry mends."""
        try:
            self._start()
            while not stop.is_set():
                self._turn()
            self._stop_cleanly()
        finally:
            self._close()

    def status(self) -> Status:
        """What the worker was doing at its last turn."""
        return self._status

    # --- what happens to one record ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.time()
        self._wake.clear()
        # 1. A record arrives and is read; the job table is asked about it.
        self._take_arrivals()
        # 2. The answer decides: publish what is there, end what must not run, let the rest wait its turn.
        for jobs, stored in self._lookups.results():
            for job in jobs:
                self._settle(job, stored.get(job.row.id), now)
        # 3. What is due: cancels, deadlines, retries; and partitions that were taken away.
        self._keep_time(now)
        # 4. Admission chooses what runs next. Its attempt is written before the engine has it.
        self._choose(now)
        for begun, allowed in self._begins.results():
            self._note_begun(begun, allowed)
        # 5. The engine takes what has begun, and gives back what has ended.
        self._drive_engine(now)
        # 6. The guarded write says whose answer counts, and that one is published.
        for ended, finished in self._finishes.results():
            self._note_finished(ended, finished)
        for rejections, _ in self._rejects.results():
            self._publish_rejections(rejections)
        for returned, _ in self._returns.results():
            self._note_returned(returned)
        # 7. Once Kafka has confirmed it, the record is done, and its consumer may commit its offset.
        for publication in self._publisher.confirmed():
            self._note_confirmed(publication.about)
        self._rest()

    # --- 1. arrival -------------------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        for _ in range(0 if self._draining else ARRIVALS_A_TURN):
            inbox = next((inbox for inbox in self._arrivals.values() if inbox), None)
            if inbox is None:
                return
            self._take(inbox.popleft())

    def _take(self, delivery: Delivery) -> None:
        if delivery.assignment.revoked:
            self._release(delivery)
            return
        record = read(delivery, self._config.pool, self._models)
        if isinstance(record, Rejection):
            self._rejects.put([record])
        else:
            self._hold(record)

    def _hold(self, job: Job) -> None:
        """Take a job on; a second record of one that is held joins it, or waits if its content differs."""
        held = self._jobs.setdefault(job.row.id, job)
        if held is job:
            if job.deadline_s is not None:
                self._deadlines.put(job.deadline_s, job)
            self._look_up(job)
        elif held.row.content_sha == job.row.content_sha:
            held.deliveries += job.deliveries
        else:  # the table will say which of the two came first
            self._park(job, time.time() + LOOK_AGAIN_S)

    def _look_up(self, job: Job) -> None:
        job.stage = Stage.ARRIVED
        self._lookups.put([job])

    def _call_lookup(self, jobs: list[Job]) -> dict[UUID, StoredJob]:
        """Ids that the table has no day for are left out."""
        rows = [job.row for job in jobs if self._ledger.keeps(job.row.id)]
        return self._ledger.lookup(rows, self._config.name)

    # --- 2. what the table says -------------------------------------------------------------------------------------

    def _settle(self, job: Job, stored: StoredJob | None, now: float) -> None:
        if stored is None:
            self._reject(
                job, ErrorCode.JOB_ID_OUT_OF_RANGE, "the job table keeps no day that this id could be of"
            )
            return
        job.run, job.attempt = stored.run, stored.attempt
        if stored.content_sha not in (None, job.row.content_sha):
            self._reject(
                job, ErrorCode.DUPLICATE_JOB_ID, "another job with this id and other content came first"
            )
        elif stored.state is not None and stored.state.terminal:
            self._publish_stored(job, stored)
        elif job.revoked:
            self._forget(job)
        elif stored.live_elsewhere:
            self._park(job, now + LOOK_AGAIN_S)
        elif stored.cancelled or job.verdict is JobState.CANCELLED or self._is_cancelled(job):
            self._end_as(job, JobState.CANCELLED)
        elif job.problem is not None:
            self._end(job, self._unsuccessful(job, JobState.FAILED, job.problem))
        elif job.expired(now):
            self._end_as(job, JobState.EXPIRED)
        elif suspects.is_guilty(stored):
            job.dead_letter = ENGINE_KILLER
            self._end(job, self._unsuccessful(job, JobState.FAILED, ENGINE_KILLER))
        else:
            self._let_wait(job, stored, now)

    def _let_wait(self, job: Job, stored: StoredJob, now: float) -> None:
        job.stage = Stage.WAITING
        if suspects.runs_apart(stored):
            self._suspects.put(job, stored.group_size)
        else:
            self._admission.put(job, job.tier, now)

    def _publish_stored(self, job: Job, stored: StoredJob) -> None:
        if stored.result is None:  # kept elsewhere; whoever wrote the row has published where
            self._forget(job)
            return
        if stored.state is JobState.FAILED:
            job.dead_letter = dead_letter_reason(stored.result)
        self._publish(job, stored.result)

    # --- 3. time ----------------------------------------------------------------------------------------------------

    def _keep_time(self, now: float) -> None:
        self._take_cancels()
        for job in self._deadlines.due(now):
            self._stop(job, JobState.EXPIRED)
        for job in [] if self._draining else self._parked.due(now):
            if self._jobs.get(job.row.id) is job:
                self._look_up(job)
            elif job.revoked:
                self._forget(job)
            else:
                self._hold(job)
        revokes = sum(consumer.revokes for consumer in self._consumers.values())
        if revokes != self._revokes:
            self._revokes = revokes
            self._forget_revoked()

    def _take_cancels(self) -> None:
        if not self._cancel_inbox:
            return
        while self._cancel_inbox:
            self._cancels.add(self._cancel_inbox.popleft())
        for job in list(self._jobs.values()):
            if job.verdict is None and self._is_cancelled(job):
                self._stop(job, JobState.CANCELLED)

    def _is_cancelled(self, job: Job) -> bool:
        return self._cancels.cover(job.row.id, job.row.tenant, job.row.batch_id)

    def _stop(self, job: Job, state: JobState) -> None:
        """End a job as cancelled or expired, wherever it is; one that is being written has its outcome already."""
        job.verdict = state
        if job.stage is Stage.WAITING:
            self._end_as(job, state)
        elif job.stage is Stage.PARKED and self._jobs.get(job.row.id) is job:
            self._look_up(job)
        elif job.stage is Stage.RUNNING:
            self._stopped.append(job)

    def _park(self, job: Job, until: float) -> None:
        job.stage = Stage.PARKED
        self._parked.put(until, job)

    def _forget_revoked(self) -> None:
        """Drop what only waits and is another worker's now. What runs goes on under its attempt."""
        for job in list(self._jobs.values()):
            if job.stage in (Stage.WAITING, Stage.PARKED) and job.revoked:
                self._forget(job)

    # --- 4. admission -----------------------------------------------------------------------------------------------

    def _choose(self, now: float) -> None:
        if self._draining or not self._attempts.ready or (self._apart and self._in_flight):
            return
        self._apart = False
        if not self._suspects:
            room = self._config.max_in_flight - len(self._in_flight)
            self._begin(self._admission.take(room, now), 0)
        elif not self._in_flight:
            group = self._suspects.next_group()
            self._apart = bool(group)
            self._begin(group, len(group))

    def _begin(self, jobs: Iterable[Job], group_size: int) -> None:
        begun = []
        for job in jobs:
            job.stage = Stage.STARTING
            self._in_flight[job.row.id] = job
            attempt = AttemptRow(job.row, self._config.name, job.attempt + 1, job.run, group_size)
            begun.append((job, attempt))
        if begun:
            self._begins.put(begun)

    def _call_begin(self, begun: list[tuple[Job, AttemptRow]]) -> Begun:
        return self._ledger.begin([attempt for _, attempt in begun])

    def _note_begun(self, begun: list[tuple[Job, AttemptRow]], answer: Begun) -> None:
        for job, attempt in begun:
            if job.row.id in answer:
                job.attempt = attempt.attempt
                self._ready.append(job)
                continue
            del self._in_flight[job.row.id]
            if job.row.id in answer.refused:
                self._reject(job, ErrorCode.LEDGER_REJECTED, answer.refused[job.row.id])
            else:  # somebody was quicker: the table knows more now
                self._look_up(job)

    # --- 5. the engine ----------------------------------------------------------------------------------------------

    def _drive_engine(self, now: float) -> None:
        self._attempts.reopen()
        if not self._attempts.ready:
            return
        try:
            self._start_ready(now)
            stopped, self._stopped = self._stopped, []
            if stopped:
                self._attempts.abort(stopped)
            ended = self._attempts.collect(0.0 if self._wake.is_set() else ENGINE_WAIT_S)
        except EngineDead as death:
            self._return(self._attempts.bury(death), died=True)
            return
        for job, completion in ended:
            self._conclude(job, completion, now)

    def _start_ready(self, now: float) -> None:
        ready, self._ready = self._ready, []
        start = []
        for job in ready:
            if job.verdict is None and job.expired(now):
                job.verdict = JobState.EXPIRED
            if job.verdict is None:
                start.append((job, self._admission.rank(job.tier)))
            else:
                self._end_as(job, job.verdict)
        if start:
            self._attempts.start(start)

    def _conclude(self, job: Job, done: TextCompletion, now: float) -> None:
        aborted = any(choice.finish_reason is FinishReason.ABORT for choice in done.choices)
        if job.verdict is not None and (aborted or done.error is not None):
            self._end_as(job, job.verdict)
        elif aborted:
            self._return([job], died=False)
        elif done.error is None:
            self._end(job, self._succeeded(job, done))
        elif (retry := retry_for(done.error, job.attempt)) is not None:
            self._return([job], died=False, until=now + retry.wait_s(job.attempt))
        else:
            self._end(job, self._unsuccessful(job, JobState.FAILED, to_error(done.error)))

    def _return(self, jobs: Iterable[Job], *, died: bool, until: float = 0.0) -> None:
        """End attempts without an outcome; then the jobs are parked until they are due."""
        returned = []
        for job in jobs:
            job.stage = Stage.ARRIVED
            returned.append((job, died, until))
        self._returns.put(returned)

    def _call_end_attempts(self, returned: list[tuple[Job, bool, float]]) -> None:
        for died in (False, True):
            ids = [job.row.id for job, was_dead, _ in returned if was_dead is died]
            if ids:
                self._ledger.end_attempts(self._config.name, ids, died=died)

    def _note_returned(self, returned: list[tuple[Job, bool, float]]) -> None:
        for job, _, until in returned:
            del self._in_flight[job.row.id]
            self._park(job, until)

    # --- 6. the outcome ---------------------------------------------------------------------------------------------

    def _end_as(self, job: Job, state: JobState) -> None:
        self._end(job, self._unsuccessful(job, state, VERDICTS[state]))

    def _end(self, job: Job, result: JobResult) -> None:
        """Have the result written; from here on nothing else can happen to the job."""
        job.stage = Stage.ENDING
        self._in_flight.pop(job.row.id, None)
        self._finishes.put([(job, outcome(job, result, self._config.max_result_bytes))])

    def _succeeded(self, job: Job, done: TextCompletion) -> JobResult:
        assert job.request is not None
        model, worker = self._attempts.model, self._config.name
        return succeeded(job.request, done, model=model, worker=worker, run=job.run, attempt=job.attempt)

    def _unsuccessful(self, job: Job, state: JobState, error: JobError) -> JobResult:
        return unsuccessful(
            job.envelope,
            state,
            error,
            job=job.request,
            worker=self._config.name,
            run=job.run,
            attempt=job.attempt,
        )

    def _call_finish(self, ended: list[tuple[Job, OutcomeRow]]) -> Finished:
        return self._ledger.finish([row for _, row in ended])

    def _note_finished(self, ended: list[tuple[Job, OutcomeRow]], finished: Finished) -> None:
        for job, row in ended:
            ours = job.row.id in finished.changed
            body = row.body if ours else finished.winners.get(job.row.id)
            if body is not None:
                self._publish(job, body)
            elif job.row.id in finished.refused:
                self._reject(job, ErrorCode.LEDGER_REJECTED, finished.refused[job.row.id])
            else:  # other content, or a later run: the table decides anew
                self._look_up(job)

    def _publish(self, job: Job, body: bytes) -> None:
        job.stage = Stage.ENDING
        job.unconfirmed = 1
        self._publisher.put(result_record(self._config.topics.results, job, body))
        if job.dead_letter is not None:
            job.unconfirmed += 1
            reason, record = job.dead_letter, job.deliveries[0]
            self._publisher.put(
                dead_letter(self._config.topics.dead, record, job.row, reason.code, reason.message, job)
            )

    def _reject(self, job: Job, code: ErrorCode, message: str) -> None:
        """No job after all: each of its records is rejected at its own place."""
        row = job.row
        self._rejects.put(
            reject(delivery, code, message, row.tenant, row.batch_id, row.custom_id)
            for delivery in job.deliveries
        )
        self._let_go(job)

    def _call_reject(self, rejections: list[Rejection]) -> None:
        self._ledger.reject([rejection.row for rejection in rejections])

    def _publish_rejections(self, rejections: list[Rejection]) -> None:
        for rejection in rejections:
            row = rejection.row
            self._publisher.put(
                dead_letter(
                    self._config.topics.dead, rejection.delivery, row, row.code, row.message, rejection
                )
            )

    # --- 7. done ----------------------------------------------------------------------------------------------------

    def _note_confirmed(self, about: Job | Rejection) -> None:
        if isinstance(about, Rejection):
            self._release(about.delivery)
            return
        about.unconfirmed -= 1
        if about.unconfirmed == 0:
            self._forget(about)

    def _forget(self, job: Job) -> None:
        """The worker is through with a job, or another worker has its records."""
        self._let_go(job)
        for delivery in job.deliveries:
            self._release(delivery)

    def _let_go(self, job: Job) -> None:
        job.stage = Stage.GONE
        if self._jobs.get(job.row.id) is job:
            del self._jobs[job.row.id]

    def _release(self, delivery: Delivery) -> None:
        self._consumers[delivery.tier].release(delivery)

    def _rest(self) -> None:
        for consumer in self._consumers.values():
            if consumer.failure is not None:
                raise consumer.failure
        if time.monotonic() - self._status.at > STATUS_EVERY_S:
            self._status = self._take_status()
        if not self._attempts:  # else the engine was waited for
            self._wake.wait(PUBLISH_WAIT_S if self._publisher.unconfirmed else IDLE_WAIT_S)

    def _take_status(self) -> Status:
        return Status(
            worker=self._config.name,
            model=self._attempts.model,
            ready=self._attempts.ready and not self._draining,
            stopping=self._draining,
            partitions={name: consumer.partitions for name, consumer in self._consumers.items()},
            waiting=self._admission.waiting(),
            held=len(self._jobs),
            in_flight=len(self._in_flight),
            finishing=self._finishes.pending,
            unconfirmed=self._publisher.unconfirmed,
        )

    # --- starting and stopping --------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._heartbeat.start()
        if self._config.health_port is not None:
            self._health = HealthServer(self._config.health_port, self.status)
        self._control.start()
        for consumer in self._consumers.values():
            consumer.start()
        log.info("worker %s takes jobs for %s", self._config.name, ", ".join(sorted(self._models)))

    def _stop_cleanly(self) -> None:
        """Stop in an order that loses nothing and repeats little."""
        log.info("stopping: %d jobs in flight", len(self._in_flight))
        # 1. Take nothing more. The consumers go on polling, so that the group stays as it is and commits go through.
        self._draining = True
        for consumer in self._consumers.values():
            consumer.hold()
        # 2. What only waits is given back by forgetting it: it has no attempt, and its offset stays where it is.
        # 3. Let what runs finish, for as long as we are given.
        self._turn_while(lambda: self._in_flight, self._config.grace_s)
        # 4. Stop the rest and end its attempts, so that the next worker starts it at once and suspects nobody.
        if self._in_flight:
            log.info("giving back %d jobs", len(self._in_flight))
            self._give_back()
        # 5. Write and publish what has ended.
        self._turn_while(self._unfinished, FLUSH_S)
        # 6. Commit, and leave the groups; 7. say goodbye, and let the engine go: see _close.

    def _turn_while(self, condition: Callable[[], object], seconds: float) -> None:
        until = time.monotonic() + seconds
        while condition() and time.monotonic() < until:
            self._turn()

    def _give_back(self) -> None:
        try:
            self._attempts.abort_all()
        except EngineDead:
            log.info("the engine was dead already")
        self._turn_while(lambda: self._attempts, 5.0)
        self._returns.put(
            [(job, False, 0.0) for job in self._in_flight.values() if job.stage is not Stage.ARRIVED]
        )

    def _unfinished(self) -> bool:
        busy = not all(call.idle for call in (self._finishes, self._rejects, self._returns))
        return busy or bool(self._publisher.unconfirmed)

    def _close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close(0.0)
        for consumer in self._consumers.values():
            consumer.close(CLOSE_S)
        self._control.close(CLOSE_S)
        for call in self._calls:
            call.close()
        self._publisher.close()
        self._heartbeat.close()
        self._attempts.close()
        if self._health is not None:
            self._health.close()
        log.info("worker %s has stopped", self._config.name)
