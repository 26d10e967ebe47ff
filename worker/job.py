"""One job in a worker's memory, from its record's delivery until its result is on the results topic."""

from dataclasses import dataclass
from enum import Enum, auto

from headrace.ledger import kafka_log
from headrace.ledger.rows import JobRow, RejectionRow
from headrace.schemas import (
    Envelope,
    ErrorCode,
    InvalidJob,
    JobError,
    JobState,
    PromptJob,
    Source,
    Unparsable,
    parse_envelope,
    parse_job,
    source_of,
)
from headrace.schemas.envelope import submission_of
from headrace.worker import translate
from headrace.worker.consumer import Delivery


class Stage(Enum):
    """Where a job is on its way through the worker."""

    ARRIVED = auto()  # being looked up in the job table
    PARKED = auto()  # until it is due: a retry, or another worker's attempt
    WAITING = auto()  # in admission, or set apart as a suspect
    STARTING = auto()  # its attempt is being written
    RUNNING = auto()  # in the engine
    ENDING = auto()  # being written to the table and published
    GONE = auto()  # released: nothing of it is left here


@dataclass(eq=False, slots=True)
class Job:
    """A job that this worker holds.

    request is None for a job that could not be read in full; ``problem`` then says why. deliveries: the record, and
    any further record of the same id and content; all are released together. verdict: how it is to end instead of
    being answered. dead_letter: why its record is a dead letter too, by the outcome that it has. attempt: the latest,
    which may have been given back or have died; failures: those before it that failed and were to be tried again.
    unconfirmed: records of it that Kafka has not confirmed yet.
    """

    envelope: Envelope
    row: JobRow
    deliveries: list[Delivery]
    request: PromptJob | None
    problem: JobError | None = None
    stage: Stage = Stage.ARRIVED
    run: int = 1
    attempt: int = 0
    failures: int = 0
    group_size: int = 0
    cost: int = 0
    verdict: JobState | None = None
    dead_letter: JobError | None = None
    unconfirmed: int = 0
    deadline_s: float | None = None

    @property
    def tier(self) -> str:
        return self.row.tier

    @property
    def tenant(self) -> str:
        return self.row.tenant

    @property
    def waiting(self) -> bool:
        """Whether it may still be admitted."""
        return self.stage is Stage.WAITING

    @property
    def revoked(self) -> bool:
        """Whether every record of it belongs to another consumer now."""
        return all(delivery.assignment.revoked for delivery in self.deliveries)

    def in_run(self, run: int) -> bool:
        """Whether its present run is the one asked for, or a later one."""
        return run <= max(self.run, self.row.run)

    def expired(self, now: float) -> bool:
        """Whether its deadline has passed; ``now`` in seconds since the epoch."""
        return self.deadline_s is not None and self.deadline_s <= now


@dataclass(frozen=True, eq=False, slots=True)
class Rejection:
    """A record that is no job: it is noted in the table and its bytes go to the dead-letter topic."""

    delivery: Delivery
    row: RejectionRow


def read(delivery: Delivery, pool: str, models: frozenset[str]) -> Job | Rejection:
    """What a record is. Never raises: a bad record is one of the two answers."""
    place, source = delivery.assignment, source_of_delivery(delivery)
    try:
        request = parse_job(delivery.value, delivery.headers, source)
    except Unparsable as error:
        return reject(delivery, error.code, error.message, error.tenant, error.batch_id, error.custom_id)
    except InvalidJob as error:
        problem = JobError(code=error.code, message=error.message, param=error.param)
        row = JobRow.of(error.envelope, source, delivery.tier, pool)
        return _job(row, error.envelope, delivery, None, problem)
    except Exception as error:
        # A defect of ours. It must cost this record and not the worker, which would meet it again and again.
        kafka_log.unread(place.topic, place.partition, delivery.offset, error)
        return _unread(delivery, source, pool, f"reading the record failed with {type(error).__name__}")
    envelope = request.envelope
    row = JobRow.of(envelope, source, delivery.tier, pool)
    return _job(row, envelope, delivery, request, _unknown_model(request, models))


def _unread(delivery: Delivery, source: Source, pool: str, message: str) -> Job | Rejection:
    """A record that a defect keeps from being read. It is a job where its envelope can be had, as the recorder sees it
    too; rejected, it would count twice in its batch."""
    try:
        envelope = parse_envelope(delivery.value, delivery.headers, source)
    except Exception:
        return reject(delivery, ErrorCode.INTERNAL_ERROR, message)
    row = JobRow.of(envelope, source, delivery.tier, pool)
    return _job(row, envelope, delivery, None, JobError(code=ErrorCode.INTERNAL_ERROR, message=message))


def source_of_delivery(delivery: Delivery) -> Source:
    """Where the record lies, or for one that was sent again where the first one lay."""
    place = delivery.assignment
    return source_of(delivery.headers, place.topic, place.partition, delivery.offset, delivery.timestamp_ms)


def reject(
    delivery: Delivery,
    code: str,
    message: str,
    tenant: str = "default",
    batch_id: str | None = None,
    custom_id: str | None = None,
    same_batch: bool = False,
) -> Rejection:
    """The rejection of one record. same_batch: of a duplicate, whether the job that came first is of its batch."""
    source = source_of_delivery(delivery)
    row = RejectionRow(
        source.topic,
        source.partition,
        source.offset,
        tenant,
        str(code),
        message,
        batch_id,
        custom_id,
        source.run,
        submission_of(delivery.headers),
        same_batch,
    )
    return Rejection(delivery, row)


def _job(
    row: JobRow, envelope: Envelope, delivery: Delivery, request: PromptJob | None, problem: JobError | None
) -> Job:
    deadline = None if row.deadline is None else row.deadline.timestamp()
    cost = 0 if request is None else translate.cost(request)
    return Job(envelope, row, [delivery], request, problem, cost=cost, deadline_s=deadline)


def _unknown_model(request: PromptJob, models: frozenset[str]) -> JobError | None:
    if request.model is None or request.model in models:
        return None
    message = f"no worker of this pool serves {request.model!r}; it serves {', '.join(sorted(models))}"
    return JobError(code=ErrorCode.UNKNOWN_MODEL, message=message, param="model")
