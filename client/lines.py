"""From whatever a pipeline holds (a dict, a PromptJob, a line of a file) to the record that goes to Kafka."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b, sha256
from typing import Any, NamedTuple
from uuid import UUID

from headrace.client.errors import InvalidLine
from headrace.schemas import (
    Envelope,
    ErrorCode,
    InvalidJob,
    PromptJob,
    Source,
    Unparsable,
    encode_job,
    job_key,
    parse_job,
    topics,
    uuid7,
)
from headrace.schemas.envelope import MAX_ID_CHARS, read_record
from headrace.schemas.unknown_fields import UnknownFields

_REPEATED_TOLD = 5

Line = PromptJob | Mapping[str, Any] | bytes | str


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that will not succeed, and why. ``sent``: it went to Kafka all the same, to end under its batch."""

    line: int
    code: ErrorCode
    message: str
    param: str | None
    sent: bool

    @property
    def left_out(self) -> bool:
        """Whether nothing stands for the line in its batch: it was not sent, and is no second copy of one that was."""
        return not self.sent and self.code is not ErrorCode.DUPLICATE_JOB_ID

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


class SentLine(NamedTuple):
    """What is remembered of a line that names a job: its content's hash, and its number. fresh: nobody had its id before."""

    content_sha: bytes
    number: int
    fresh: bool


@dataclass
class Repeated:
    """Lines whose custom id an earlier line has: they run, but their results cannot be told apart. count; the first lines."""

    count: int = 0
    first_lines: list[int] = field(default_factory=list)
    # Hashes of eight bytes, since a file may have millions of names.
    _seen: set[int] = field(default_factory=set, repr=False, compare=False)

    def note(self, custom_id: str | None, number: int) -> None:
        """Take in a line that will run."""
        if custom_id is None:
            return
        name = int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest())
        if name in self._seen:
            self.count += 1
            if self.count <= _REPEATED_TOLD:
                self.first_lines.append(number)
        self._seen.add(name)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A line as a record. id: the job's key, None where the line is no JSON object and so never becomes a job."""

    id: UUID | None
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]
    problem: Problem | None


@dataclass
class LineReader:
    """Names and checks the lines of one batch.

    A line is never changed: what it does not say itself (tenant, batch, job id, deadline) goes along as headers. With
    an ``idempotency_key`` a line's job id is made of that and its custom id (else its number), so that submitting the
    same lines again gives the same jobs; ``submission``, a name that no other sending has, then tells this one from others.
    ``first_of`` is the first line of each job that was read, ``repeated`` those with a custom id that was there already,
    ``unknown`` the fields that no job has.
    """

    tenant: str
    batch_id: str
    idempotency_key: str | None = None
    deadline: datetime | None = None
    max_bytes: int = 900_000
    submission: str | None = None
    first_of: dict[UUID, SentLine] = field(default_factory=dict)
    repeated: Repeated = field(default_factory=Repeated)
    unknown: UnknownFields = field(default_factory=UnknownFields)
    _times_named: Counter[str] = field(default_factory=Counter)

    def read(self, line: Line, number: int) -> Outgoing:
        """The record for ``line``, the ``number``-th of the batch. Raises InvalidLine for what has no form as bytes."""
        value, headers = _bytes_of(line, number), self._headers()
        envelope, problem = self._check(value, headers, number)
        # The second job of a name is a line of its own, which the first one's job does not end.
        second = problem is not None and problem.code is ErrorCode.DUPLICATE_JOB_ID
        if self.submission is not None and not second:
            headers.append((topics.SUBMISSION, self.submission.encode()))
        key = None if envelope is None or envelope.id == _UNNAMED else envelope.id
        return Outgoing(key, str(key or uuid7()).encode(), value, headers, problem)

    def _check(
        self, value: bytes, headers: list[tuple[str, bytes]], number: int
    ) -> tuple[Envelope | None, Problem | None]:
        """Read a line as a worker will, first naming it in ``headers`` if it does not name itself."""
        if len(value) > self.max_bytes:
            message = (
                f"the line has {len(value):,} bytes, of {self.max_bytes:,} that fit into a message here; where the topics take"
                " more, raise message.max.bytes (HEADRACE_KAFKA_MESSAGE_MAX_BYTES)"
            )
            return None, Problem(number, ErrorCode.MESSAGE_TOO_LARGE, message, None, sent=False)
        problem, fresh = None, False
        try:
            body, envelope = read_record(value, headers, _NOWHERE)
            self.unknown.note(body, number)
            if envelope.id == _UNNAMED:
                fresh = self.idempotency_key is None
                headers.append((topics.JOB_ID, self._job_id(envelope.custom_id, number).encode()))
            envelope = parse_job(value, headers, _NOWHERE).envelope
        except Unparsable as error:
            self._name_unreadable(headers, number)
            return None, Problem(number, error.code, error.message, None, sent=True)
        except InvalidJob as error:
            envelope = error.envelope
            problem = Problem(number, error.code, error.message, error.param, sent=True)
        misplaced = self._misaddressed(envelope, number) or self._repeated(envelope, number, fresh)
        if misplaced is None:
            self.repeated.note(envelope.custom_id, number)
        return envelope, misplaced or problem

    def _name_unreadable(self, headers: list[tuple[str, bytes]], number: int) -> None:
        """So that its rejection can be traced to it; and that whoever follows the batch takes the line, sent again, for one."""
        headers.append((topics.CUSTOM_ID, b"line %d" % number))
        if self.idempotency_key is not None and all(name != topics.JOB_ID for name, _ in headers):
            headers.append((topics.JOB_ID, self._job_id(None, number).encode()))

    def _headers(self) -> list[tuple[str, bytes]]:
        headers = [
            (topics.CONTENT_TYPE, topics.JSON),
            (topics.TENANT, self.tenant.encode()),
            (topics.BATCH_ID, self.batch_id.encode()),
        ]
        if self.deadline is not None:
            headers.append((topics.DEADLINE, self.deadline.isoformat().encode()))
        return headers

    def _job_id(self, custom_id: str | None, number: int) -> str:
        if self.idempotency_key is None:
            return str(uuid7())
        name = custom_id or f"line {number}"
        self._times_named[name] += 1
        nth = self._times_named[name]
        # The key's digest, of fixed length, so that no two keys can name the same job whatever is in them.
        job_id = f"{sha256(self.idempotency_key.encode()).hexdigest()[:32]}:{nth}:{name}"
        return job_id if len(job_id) <= MAX_ID_CHARS else sha256(job_id.encode()).hexdigest()

    def _misaddressed(self, envelope: Envelope, number: int) -> Problem | None:
        """A line that names another batch or tenant would leave this one waiting for it."""
        for name in ("tenant", "batch_id"):
            if getattr(envelope, name) != getattr(self, name):
                message = f"{name} of the line is not the one that it is submitted under; leave it out"
                return Problem(number, ErrorCode.INVALID_VALUE, message, name, sent=False)
        return None

    def _repeated(self, envelope: Envelope, number: int, fresh: bool) -> Problem | None:
        """Two copies of a job are one job, and the batch would wait for a second."""
        if envelope.id == _UNNAMED:
            return None
        first = self.first_of.setdefault(envelope.id, SentLine(envelope.content_sha, number, fresh))
        if first.number == number:
            return None
        same = first.content_sha == envelope.content_sha
        message = f"its job_id is that of line {first.number}" + (
            "; it is the same job" if same else ", with other content"
        )
        return Problem(number, ErrorCode.DUPLICATE_JOB_ID, message, "job_id", sent=not same)


# Its missing time lets any UUIDv7 pass.
_NOWHERE = Source(topic="", partition=0, offset=0, timestamp_ms=-1)
# The id, made of the place alone, of a line that does not name itself.
_UNNAMED = job_key("", None, _NOWHERE)


def to_bytes(line: Line) -> bytes:
    """The bytes that ``line`` stands for; those of a file's line are left as they are, but for the line's end."""
    if isinstance(line, bytes):
        return line.rstrip(b"\r\n")
    if isinstance(line, str):
        return line.rstrip("\r\n").encode("utf-8", "surrogateescape")
    if isinstance(line, PromptJob):
        return encode_job(line)[1]
    # Not orjson: it would make null of NaN, and refuse the lone surrogates that the job's error is about.
    try:
        return json.dumps(line, default=_plain, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # escapes say what UTF-8 cannot, and take up to three times the room
        return json.dumps(line, default=_plain, separators=(",", ":")).encode()


def _bytes_of(line: Line, number: int) -> bytes:
    try:
        return to_bytes(line)
    except (TypeError, ValueError, RecursionError) as error:  # json's own words say which of its values
        message = f"the job cannot be written as JSON: {error}"
        raise InvalidLine(Problem(number, ErrorCode.INVALID_JSON, message, None, sent=False)) from None


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
