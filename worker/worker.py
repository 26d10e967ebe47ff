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
from collections.abc import Callable
from functools import partial
from uuid import UUID

from headrace.engine.text_engine import TextEngine
from headrace.ledger import Ledger, StoredJob
from headrace.ledger.record import DUPLICATE
from headrace.schemas import ErrorCode, JobError, JobState
from headrace.worker import suspects
from headrace.worker.admission import Admission
from headrace.worker.attempts import Attempts
from headrace.worker.bulk import BulkCall
from headrace.worker.config import WorkerConfig
from headrace.worker.consumer import Delivery, TierConsumer
from headrace.worker.control import Cancel, Cancels, ControlConsumer
from headrace.worker.health import HealthServer, Status
from headrace.worker.heartbeat import Heartbeat
from headrace.worker.held import Held
from headrace.worker.job import Job, Rejection, Stage, read
from headrace.worker.metrics import Metrics
from headrace.worker.outcomes import Outcomes
from headrace.worker.places import Places
from headrace.worker.running import Running
from headrace.worker.timetable import Timetable

log = logging.getLogger(__name__)

ARRIVALS_A_TURN = 256  # reading more at once would keep the engine's answers waiting
LOOKUPS_A_CALL = 256  # each may bring a stored result of up to a megabyte
ENGINE_WAIT_S = 0.005
PUBLISH_WAIT_S = 0.005
IDLE_WAIT_S = 0.05
STATUS_EVERY_S = 0.5
CATCH_UP_S = 5.0  # at the start, for the cancels that are there already
LOOK_AGAIN_S = 1.0  # at a job that another worker runs
ABORT_S = 5.0  # at the end, for the engine to let go
FLUSH_S = 20.0  # at the end, for what has ended to be written and published
CLOSE_S = 15.0  # at the end, for the consumers to commit and leave

ENGINE_KILLER = JobError(
    code=ErrorCode.ENGINE_FAILURE, message="the engine died again and again while it ran this job alone"
)


class Worker:
    """Takes jobs from Kafka and ends each of them: once in the table, at least once on the results topic.

    Args:
        open_engine: builds an engine; called again when it has died.
        ledger: the job table.
        health: told of this worker once it has its engine. Whoever opened it closes it.
    """

    def __init__(
        self,
        config: WorkerConfig,
        open_engine: Callable[[], TextEngine],
        ledger: Ledger,
        health: HealthServer | None = None,
    ) -> None:
        self._config, self._ledger = config, ledger
        self._wake = threading.Event()
        self._draining = False
        self._paused: str | None = None  # why no more jobs are taken for now
        self._running = Running(open_engine)
        model = self._running.model
        self._models = frozenset({model, *config.model_names})
        self._metrics = Metrics([tier.name for tier in config.tiers], model)

        self._held = Held(lambda delivery: self._consumers[delivery.tier].release(delivery))
        self._lookups = BulkCall(
            "lookup", self._call_lookup, self._wake, LOOKUPS_A_CALL, self._metrics.call("lookup")
        )
        in_flight = config.in_flight(self._running.slots)
        self._places = None if config.max_in_flight else Places(in_flight)
        self._admission: Admission[Job] = Admission(config.tiers, in_flight)
        self._suspects = suspects.Suspects()
        self._apart = False  # what is in flight is a group of suspects
        self._outcomes = Outcomes(config, model, ledger, self._held, self._metrics, self._look_up, self._wake)
        self._attempts = Attempts(
            config.name,
            self._running,
            ledger,
            self._outcomes,
            self._metrics,
            rank=self._admission.rank,
            release=self._admission.release,
            look_up=self._look_up,
            park=self._park,
            wake=self._wake,
        )
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
                prefetch=tier.holds(in_flight),
                max_bytes=config.held_bytes(in_flight),
                inbox=self._arrivals[tier.name],
                wake=self._wake,
                on_committed=partial(self._metrics.committed, tier.name),
            )
            for tier in config.tiers
        }
        self._revokes = 0
        self._control = ControlConsumer(
            config.control(), config.topics.control, self._cancel_inbox, self._wake
        )
        self._heartbeat = Heartbeat(ledger, config.name, config.pool, model, config.alive_s)
        self._health = health
        self._status = self._take_status()
        self._metrics.watch(
            self.status, lambda: {name: consumer.lag for name, consumer in self._consumers.items()}
        )

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set, then stop cleanly. Raises what no retry mends."""
        try:
            if self._heartbeat.start(stop):
                self._start()
                while not stop.is_set():
                    self._turn()
                self._stop_cleanly()
        finally:
            self._close()

    def status(self) -> Status:
        """What the worker was doing lately; safe to ask from any thread."""
        return self._status

    # --- what happens to one record ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.time()
        self._wake.clear()
        # 1. A record arrives and is read, and the job table is asked about it.
        self._take_arrivals()
        # 2. The answer decides: publish what is there, end what must not run, let the rest wait its turn.
        for jobs, stored in self._lookups.results():
            for job in jobs:
                self._settle(job, stored.get(job.row.id), now)
        # 3. What is due: cancels, deadlines, retries; and partitions that were taken away.
        self._keep_time(now)
        # 4. Admission chooses what runs next.
        self._choose(now)
        # 5. Its attempt is written, then the engine has it, until it gives it back: answered, or to be tried again.
        self._attempts.turn(now, 0.0 if self._wake.is_set() else ENGINE_WAIT_S)
        # 6. The guarded write says whose answer counts; that one is published; and when Kafka has confirmed it, the
        #    record is released, and its consumer may commit its offset.
        self._outcomes.turn()
        self._rest()

    # --- 1. arrival -------------------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        self._mind_the_brake()
        for _ in range(ARRIVALS_A_TURN if self._has_room else 0):
            inbox = next((inbox for inbox in self._arrivals.values() if inbox), None)
            if inbox is None:
                return
            self._take(inbox.popleft())

    @property
    def _has_room(self) -> bool:
        """Whether to take more jobs. Those that wait to be looked up may all bring a stored result with them."""
        closed = self._draining or self._paused or self._outcomes.unpublished_full
        return not closed and self._lookups.pending < 2 * LOOKUPS_A_CALL

    def _mind_the_brake(self) -> None:
        """Stop taking jobs once too many have become dead letters; take them again later."""
        before, self._paused = self._paused, self._outcomes.brake.reason(time.monotonic())
        if self._draining or bool(before) == bool(self._paused):
            return
        for consumer in self._consumers.values():
            consumer.hold() if self._paused else consumer.go_on()
        if self._paused:
            log.error("taking no more jobs: %s", self._paused)
        else:
            log.warning("taking jobs again; dead letters will stop it again")
        self._status = self._take_status()

    def _take(self, delivery: Delivery) -> None:
        if delivery.assignment.revoked:
            self._held.release(delivery)
            return
        record = read(delivery, self._config.pool, self._models)
        if isinstance(record, Rejection):
            self._outcomes.reject_record(record)
        else:
            self._hold(record)

    def _hold(self, job: Job) -> None:
        """Take a job on; a second record of one that is held joins it, or waits if its content differs."""
        held = self._held.take(job)
        if held is job:
            self._watch_deadline(job)
            self._look_up(job)
        elif held.row.content_sha == job.row.content_sha and held.in_run(job.row.run):
            held.deliveries += job.deliveries
        else:  # once the first has ended, the table says which of the two is the job, or opens the next run
            self._park(job, time.time() + LOOK_AGAIN_S)

    def _watch_deadline(self, job: Job) -> None:
        if job.deadline_s is not None:
            self._deadlines.put(job.deadline_s, job)

    def _look_up(self, job: Job) -> None:
        job.stage = Stage.ARRIVED
        self._lookups.put([job])

    def _call_lookup(self, jobs: list[Job]) -> dict[UUID, StoredJob]:
        """Ids that the table has no day for are left out."""
        rows = [job.row for job in jobs if self._ledger.keeps(job.row.id)]
        if sent_again := [row for row in rows if row.run > 1]:
            self._ledger.reopen(sent_again)
        return self._ledger.lookup(rows, self._config.name)

    # --- 2. what the table says -------------------------------------------------------------------------------------

    def _settle(self, job: Job, stored: StoredJob | None, now: float) -> None:
        if stored is None:
            self._outcomes.reject(
                job, ErrorCode.JOB_ID_OUT_OF_RANGE, "the job table keeps no day for this id"
            )
            return
        job.run, job.attempt, job.failures = stored.run, stored.attempt, stored.failures
        if job.deadline_s is None and stored.expires_at is not None:
            job.deadline_s = stored.expires_at.timestamp()
            self._watch_deadline(job)
        if stored.content_sha not in (None, job.row.content_sha):
            code = ErrorCode.DUPLICATE_JOB_ID
            self._outcomes.reject(job, code, DUPLICATE, same_batch=stored.same_batch)
        elif stored.state is not None and stored.state.terminal:
            self._outcomes.publish_stored(job, stored)
        elif job.revoked:
            self._held.forget(job)
        elif stored.live_elsewhere:
            self._park(job, now + LOOK_AGAIN_S)
        elif stored.cancelled or job.verdict is JobState.CANCELLED or self._is_cancelled(job):
            self._outcomes.end_as(job, JobState.CANCELLED)
        elif job.problem is not None:
            self._outcomes.fail(job, job.problem)
        elif job.expired(now):
            self._outcomes.end_as(job, JobState.EXPIRED)
        elif suspects.is_guilty(stored):
            self._outcomes.fail(job, ENGINE_KILLER)
        else:
            self._let_wait(job, stored, now)

    def _let_wait(self, job: Job, stored: StoredJob, now: float) -> None:
        job.stage = Stage.WAITING
        if suspects.runs_apart(stored):
            self._suspects.put(job, stored.group_size)
        else:
            self._admission.put(job, now)

    # --- 3. what is due ---------------------------------------------------------------------------------------------

    def _keep_time(self, now: float) -> None:
        self._take_cancels()
        for job in self._deadlines.due(now):
            self._stop_as(job, JobState.EXPIRED)
        for job in [] if self._draining else self._parked.due(now):
            if job in self._held:
                self._look_up(job)
            elif job.revoked:
                self._held.forget(job)
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
        for job in self._held:
            if job.verdict is None and self._is_cancelled(job):
                self._stop_as(job, JobState.CANCELLED)

    def _is_cancelled(self, job: Job) -> bool:
        return self._cancels.cover(job.row.id, job.row.tenant, job.row.batch_id)

    def _stop_as(self, job: Job, state: JobState) -> None:
        """End a job as cancelled or expired, wherever it is; one that is ending has its outcome already."""
        job.verdict = state
        if job.stage is Stage.WAITING:
            self._outcomes.end_as(job, state)
        elif job.stage is Stage.PARKED and job in self._held:
            self._look_up(job)
        elif job.stage is Stage.RUNNING:
            self._attempts.stop(job)

    def _park(self, job: Job, until: float) -> None:
        job.stage = Stage.PARKED
        self._parked.put(until, job)

    def _forget_revoked(self) -> None:
        """Drop what only waits and is another worker's now. What runs goes on under its attempt."""
        for job in self._held:
            if job.stage in (Stage.WAITING, Stage.PARKED) and job.revoked:
                self._held.forget(job)

    # --- 4. admission -----------------------------------------------------------------------------------------------

    def _choose(self, now: float) -> None:
        if (
            self._draining
            or not self._running.ready
            or (self._apart and self._attempts)
            or self._outcomes.full
        ):
            return
        self._apart = False
        if not self._suspects:
            if self._places is not None and (engine := self._running.stats) is not None:
                self._admission.resize(self._places.at(now, engine.running))
            self._attempts.begin(self._admission.take(now))
        elif not self._attempts:
            group = self._suspects.next_group()
            self._apart = bool(group)
            self._attempts.begin(group, group_size=len(group))

    def _rest(self) -> None:
        for consumer in self._consumers.values():
            if consumer.failure is not None:
                raise consumer.failure
        if time.monotonic() - self._status.at > STATUS_EVERY_S:
            self._status = self._take_status()
        if not self._running:  # else the engine was waited for
            self._wake.wait(PUBLISH_WAIT_S if self._outcomes.unconfirmed else IDLE_WAIT_S)

    def _take_status(self) -> Status:
        return Status(
            worker=self._config.name,
            model=self._running.model,
            ready=self._running.ready and not self._draining and not self._paused,
            stopping=self._draining,
            partitions={name: consumer.partitions for name, consumer in self._consumers.items()},
            waiting=self._admission.waiting(),
            held=len(self._held),
            in_flight=len(self._attempts),
            finishing=self._outcomes.writing,
            unconfirmed=self._outcomes.unconfirmed,
            paused=self._paused,
            engine=self._running.stats,
        )

    # --- starting and stopping --------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._health is not None:
            self._health.tell(self.status, self._metrics.registry)
        self._control.start()
        self._control.wait_until_caught_up(CATCH_UP_S)  # or go on: the job table knows of cancels too
        for consumer in self._consumers.values():
            consumer.start()
        log.info("worker %s takes jobs for %s", self._config.name, ", ".join(sorted(self._models)))

    def _stop_cleanly(self) -> None:
        """Stop in an order that loses nothing and repeats little."""
        log.info("stopping: %d jobs in flight", len(self._attempts))
        # 1. Take nothing more. The consumers go on polling, so that the group stays as it is and commits go through.
        self._draining = True
        for consumer in self._consumers.values():
            consumer.hold()
        # 2. What only waits is given back by forgetting it: it has no attempt, and its offset stays where it is.
        # 3. Let what runs finish, for as long as we are given.
        self._turn_while(lambda: self._attempts, self._config.grace_s)
        # 4. Stop the rest and end its attempts, so that the next worker starts it at once and suspects nobody.
        if self._attempts:
            log.info("giving back %d jobs", len(self._attempts))
        self._attempts.give_back()
        self._turn_while(lambda: self._attempts, ABORT_S)
        # 5. Write and publish what has ended. What the results store has not taken by then is given back as well.
        self._turn_while(lambda: not self._outcomes.idle, FLUSH_S)
        if unkept := self._outcomes.give_up_keeping():
            log.warning("giving back %d jobs whose results the results store has not taken", len(unkept))
            self._attempts.give_back_ended(unkept)
            self._turn_while(lambda: self._attempts, ABORT_S)
        # What has not been let go or taken by now stays as a death would leave it, and its offset is not committed.
        # Attempts that have left the engine, or never reached it, wait for Postgres as results do.
        if hung := len(self._running):
            log.warning("the engine does not let go of %d jobs: they will run again", hung)
        if unwritten := len(self._attempts) - hung + self._outcomes.writing:
            log.warning("Postgres does not take how %d jobs ended: they will run again", unwritten)
        if unconfirmed := self._outcomes.unconfirmed:
            log.warning("Kafka does not take %d records: they will be published again", unconfirmed)
        # 6. Commit and leave the groups, then let the engine go and say goodbye: _close, which a crash comes to also.

    def _turn_while(self, condition: Callable[[], object], seconds: float) -> None:
        until = time.monotonic() + seconds
        while condition() and time.monotonic() < until:
            self._turn()

    def _close(self) -> None:
        consumers: list[TierConsumer | ControlConsumer] = [*self._consumers.values(), self._control]
        until = time.monotonic() + CLOSE_S
        for consumer in consumers:  # all at once: while Kafka is away they all hang
            consumer.close(0.0)
        for consumer in consumers:
            consumer.close(max(0.0, until - time.monotonic()))
        self._lookups.close()
        self._attempts.close()  # and the engine with it
        self._outcomes.close()
        self._heartbeat.close()
        log.info("worker %s has stopped", self._config.name)
