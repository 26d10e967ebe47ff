"""What a pipeline imports: submit jobs, cancel them, follow their results."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from itertools import chain
from typing import Any, Self, TypeVar
from uuid import UUID

from pydantic import ValidationError

from headrace.client.errors import DeliveryFailed, InvalidLine, InvalidName, NoJobs
from headrace.client.lines import Line, LineReader, Outgoing, Problem, Repeated, SentLine
from headrace.client.outbox import Outbox
from headrace.client.refusals import Refusals
from headrace.client.results import Follower
from headrace.schemas import (
    BatchClosed,
    BatchOpened,
    CancelBatch,
    CancelJob,
    ControlMessage,
    JobResult,
    PromptJob,
    Topics,
    UnreadableResult,
    uuid7,
)
from headrace.schemas.envelope import MAX_ID_CHARS
from headrace.schemas.explain import LONE_SURROGATE
from headrace.schemas.ids import key_meant
from headrace.schemas.unknown_fields import UnknownField
from headrace.store import StoreError, open_store

log = logging.getLogger(__name__)

# A record travels with its headers and its batch's framing, and a broker's limit is on the whole.
_FRAMING = 64 * 1024
_CANCEL_S = 3.0  # for the cancel of a batch that failed: Kafka may be what failed, and somebody waits

_Message = TypeVar("_Message", bound=ControlMessage)


@dataclass(frozen=True, slots=True)
class Submission:
    """A batch that was handed over.

    ids: of the jobs, in the order of their lines. expected: how many records were sent, which is how many end.
    problems: lines that will not succeed, the first first; then those that were found to be refused while the results were
    followed. repeated: lines that have a custom id of earlier ones. unknown: fields of theirs that no job has, misspelt maybe,
    which are ignored. lines: of each job, what it was sent with. sending: its
    name among those of the batch, which under an idempotency key may be several.
    """

    tenant: str
    batch_id: str
    ids: list[UUID]
    expected: int
    problems: list[Problem]
    repeated: Repeated = field(default_factory=Repeated)
    unknown: list[UnknownField] = field(default_factory=list)
    lines: Mapping[UUID, SentLine] = field(default_factory=dict, repr=False, compare=False)
    sending: str | None = field(default=None, repr=False, compare=False)


class Client:
    """A producer's side of Headrace. For one thread; close it, or use it as a context.

    bootstrap: Kafka's bootstrap servers. tenant: on whose behalf. kafka: more settings for librdkafka (security, or
    ``message.max.bytes`` where the broker's topics take more than 1 MB). result_store: where the workers keep results
    too large for a message, a directory or ``s3://bucket/prefix``. confirmed: how many jobs of the latest submit Kafka has
    said it has, also where that submit broke off.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Topics | None = None,
        *,
        tenant: str = "default",
        kafka: Mapping[str, Any] | None = None,
        result_store: str | None = None,
    ) -> None:
        self._store = None if result_store is None else open_store(result_store)
        self.topics = topics or Topics()
        self.tenant = tenant
        self._kafka = {"bootstrap.servers": bootstrap, **(kafka or {})}
        self._outbox = Outbox(self._kafka)  # refuses what is no number
        self._max_bytes = int(self._kafka.get("message.max.bytes", 1_000_000)) - _FRAMING
        self._found: set[str] = set()
        self.confirmed = 0

    def submit(
        self,
        jobs: Iterable[Line],
        tier: str = "standard",
        *,
        batch_id: str | None = None,
        deadline: datetime | None = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        strict: bool = False,
    ) -> Submission:
        """Send ``jobs`` as one batch: open it, send each, close it with their number.

        A job is a PromptJob, a dict, or a line of a JSON lines file (blank ones are skipped), as a PromptJob or in
        OpenAI's batch format. Bad lines are sent as they are, so that they end under their batch, and reported; those
        too large for a message, and those of another batch or tenant, are reported and left out (``Problem.left_out``).
        Fields that no job has are ignored, and named in ``Submission.unknown``.
        ``strict`` raises InvalidLine for the first instead, before anything is sent where ``jobs`` can be read twice.
        ``deadline`` is for jobs that have none of their own. With an ``idempotency_key`` the batch and its jobs get
        the same ids each time: call again after a failure.

        A batch that was not handed over whole is cancelled if this call made up its name. One with a ``batch_id`` or
        an idempotency key stays open: for the next call, and since its jobs may be another's.

        Raises TypeError for a single job or a file's name, InvalidName, NoJobs, BrokerUnreachable and TopicMissing before
        anything is sent, InvalidLine for a job that cannot be written as JSON, and DeliveryFailed when Kafka did not take
        everything.
        """
        self.confirmed = 0
        _must_be_several(jobs)
        topic = self.topics.jobs(tier)
        if idempotency_key is not None and not isinstance(idempotency_key, str):
            raise InvalidName(f"idempotency_key must be a string; this is {type(idempotency_key).__name__}")
        if idempotency_key == "":
            raise InvalidName("idempotency_key is empty; leave it out, or give one")
        named = batch_id is not None or idempotency_key is not None
        if batch_id is None:
            batch_id = (
                f"batch_{uuid7()}"
                if idempotency_key is None
                else batch_named_by(self.tenant, idempotency_key)
            )
        opened = _message(
            BatchOpened,
            tenant=self.tenant,
            batch_id=batch_id,
            opened_at=datetime.now(UTC),
            expires_at=deadline,
            metadata=dict(metadata or {}),
        )

        submission = None if idempotency_key is None else str(uuid7())

        def reader() -> LineReader:
            return LineReader(
                self.tenant, batch_id, idempotency_key, opened.expires_at, self._max_bytes, submission
            )

        if strict:
            _check_ahead(jobs, reader())
        reading = reader()
        outgoing = _read(jobs, reading)
        first = next(outgoing, None)
        if first is None:
            raise NoJobs("there are no jobs to send")
        self._require(topic, self.topics.control)
        try:
            self._send_control(opened)
            sent = self._send_jobs(chain([first], outgoing), topic, reading, strict)
            closed = BatchClosed(
                tenant=self.tenant, batch_id=batch_id, expected=sent.expected, submission=submission
            )
            self._send_control(closed)
        except BaseException:
            self._outbox.drop()
            self._outbox = Outbox(self._kafka)
            if not named:
                with suppress(DeliveryFailed):
                    self._send_control(CancelBatch(tenant=self.tenant, batch_id=batch_id), _CANCEL_S)
            raise
        return sent

    def cancel_batch(self, batch_id: str) -> None:
        """End the jobs of a batch that have not ended, and those still to come."""
        cancel = _message(CancelBatch, tenant=self.tenant, batch_id=batch_id)
        self._require(self.topics.control)
        self._send_control(cancel)

    def cancel_job(self, job: UUID | str) -> None:
        """End a job: by its id, or by the ``job_id`` that it was sent with."""
        id = job if isinstance(job, UUID) else key_meant(self.tenant, job)
        cancel = _message(CancelJob, tenant=self.tenant, id=id)
        self._require(self.topics.control)
        self._send_control(cancel)

    def follow_results(
        self,
        batch: str | Submission,
        *,
        idle_timeout: float | None = None,
    ) -> Iterator[JobResult]:
        """Results of a batch as they come, each (id, run) once, from the batch's opening on.

        Ends when the batch is closed and as many of its lines have ended as were sent; or when nothing has come for
        ``idle_timeout`` seconds. Of a batch sent several times under its idempotency key each line counts once, and the
        largest number holds. A result too large for a message is read from the results store; one that cannot be read there
        comes as it was published, with ``result_ref`` instead of its answers; one that the topic did not take has an
        ``error`` beside ``succeeded``.

        Given the Submission, it also waits for each of its jobs: by name alone it may end before a line that has replaced
        another (by another custom_id), since the one replaced has ended and counts. And it adds to ``problems`` the lines
        that turn out to be refused. Such a line has no result: that of other content which has its id is left out.

        Raises BrokerUnreachable and TopicMissing.
        """
        if isinstance(batch, str):
            follower = Follower(self._kafka, self.topics, self.tenant, batch)
        else:
            refusals = Refusals(batch.lines, batch.problems)
            follower = Follower(
                self._kafka, self.topics, self.tenant, batch.batch_id, batch.ids, refusals=refusals
            )
        return map(self._whole, follower.results(idle_timeout))

    def _whole(self, result: JobResult) -> JobResult:
        reference = result.result_ref
        if reference is None or self._store is None:
            return result
        try:
            return JobResult.decode(self._store.read(reference.uri, reference.bytes, reference.sha256))
        except (StoreError, UnreadableResult) as error:
            log.warning("the result of job %s is not read: %s", result.id, error)
            return result

    def close(self) -> None:
        """Send what is still buffered. Raises DeliveryFailed."""
        self._outbox.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None:
            self._outbox.drop()
        self.close()

    def _require(self, *topics: str) -> None:
        if missing := set(topics) - self._found:
            self._outbox.require(missing)
            self._found |= missing

    def _send_jobs(
        self, lines: Iterable[Outgoing], topic: str, reader: LineReader, strict: bool
    ) -> Submission:
        ids: list[UUID] = []
        problems: list[Problem] = []
        sent, before = 0, self._outbox.confirmed
        try:
            for outgoing in lines:
                if outgoing.problem is not None:
                    if strict:
                        raise InvalidLine(outgoing.problem)
                    problems.append(outgoing.problem)
                    if not outgoing.problem.sent:
                        continue
                self._outbox.send(topic, outgoing.key, outgoing.value, outgoing.headers)
                sent += 1
                if outgoing.id is not None:
                    ids.append(outgoing.id)
            self._outbox.flush()
        finally:
            self.confirmed = self._outbox.confirmed - before
        return Submission(
            reader.tenant,
            reader.batch_id,
            ids,
            sent,
            problems,
            reader.repeated,
            reader.unknown.found,
            reader.first_of,
            reader.submission,
        )

    def _send_control(self, message: ControlMessage, patience: float = float("inf")) -> None:
        self._outbox.send(self.topics.control, *message.encode())
        self._outbox.flush(patience)


def _must_be_several(jobs: object) -> None:
    """Raise TypeError for what would be sent in pieces: the keys of a dict, the characters of a string."""
    if isinstance(jobs, PromptJob | Mapping | bytes | str):
        raise TypeError(f"jobs must be a list, an open file or the like, not one {type(jobs).__name__}")


def batch_named_by(tenant: str, idempotency_key: str) -> str:
    """The batch that ``submit`` makes under the key where it is given none."""
    name = f"{tenant}\0{idempotency_key}".encode("utf-8", "surrogatepass")
    return f"batch_{sha256(name).hexdigest()[:32]}"


def _read(jobs: Iterable[Line], reader: LineReader) -> Iterator[Outgoing]:
    for number, job in enumerate(jobs, start=1):
        if isinstance(job, bytes | str) and not job.strip():
            continue
        yield reader.read(job, number)


def _check_ahead(jobs: Iterable[Line], reader: LineReader) -> None:
    """Read ``jobs`` once in vain, if they can be read again: a collection, or a file. Raises InvalidLine."""
    file: Any = jobs if hasattr(jobs, "seekable") else None
    rereadable = iter(jobs) is not jobs if file is None else file.seekable()
    if not rereadable:
        return
    start = None if file is None else file.tell()
    for outgoing in _read(jobs, reader):
        if outgoing.problem is not None:
            raise InvalidLine(outgoing.problem)
    if file is not None:
        file.seek(start)


def _message(kind: type[_Message], **fields: Any) -> _Message:
    """A control message of a caller's words. Raises InvalidName."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field, reason = first["loc"][0], first["msg"].removeprefix("Value error, ")
        if first["type"] in ("string_too_short", "string_too_long") and field in ("tenant", "batch_id"):
            reason = f"it must be a string of 1 to {MAX_ID_CHARS} characters"
        elif first["type"] == "string_unicode":
            reason = f"it {LONE_SURROGATE}"
        elif field == "expires_at":
            field, reason = "deadline", "it must be a datetime with a time zone, or its ISO form"
        raise InvalidName(f"{field} is not usable: {reason}") from None
