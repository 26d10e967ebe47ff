"""What everybody but the engine needs of a job: who it is, whose it is, which batch it counts for."""

from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from headrace.schemas import topics
from headrace.schemas.errors import ErrorCode, Unparsable
from headrace.schemas.ids import Source, job_key, out_of_range
from headrace.schemas.kafka_headers import UNREADABLE
from headrace.schemas.wire import clean_text, load_object

Headers = Sequence[tuple[str, bytes | None]] | None

DEFAULT_TENANT = "default"
MAX_ID_CHARS = 256

# The same id with the same content is the same job. How a job is named, sent and scheduled is not content.
NOT_CONTENT = frozenset(
    {"job_id", "idempotency_key", "tenant", "batch_id", "custom_id", "deadline", "schema_version"}
)
_EARLIEST_DEADLINE = datetime(2000, 1, 1, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Envelope(NamedTuple):
    """A job as the job table first sees it.

    job_id: as the producer wrote it, None where it named none. content_sha: SHA-256 over tenant, batch id, custom id
    and the canonical JSON of the rest of the record but for NOT_CONTENT. submitted_at: the record's timestamp. Text is
    clean (no NUL, no lone surrogate); a field of the wrong type or length is None here and fails the job later.
    """

    id: UUID
    tenant: str
    job_id: str | None
    batch_id: str | None
    custom_id: str | None
    model: str | None
    deadline: datetime | None
    content_sha: bytes
    submitted_at: datetime


class Record(NamedTuple):
    """A record that is a JSON object: its body, with what only the headers said filled in, and its envelope."""

    body: dict[str, Any]
    envelope: Envelope


def parse_envelope(value: bytes | None, headers: Headers, source: Source) -> Envelope:
    """The envelope of a job. Cheap: the job itself is not validated. Raises Unparsable."""
    return read_record(value, headers, source).envelope


def read_record(value: bytes | None, headers: Headers, source: Source) -> Record:
    """Body and envelope of a record. Raises Unparsable."""
    given, unreadable = _from_headers(headers)
    try:
        if unreadable:
            message = f"{unreadable[0]} is not UTF-8"
            raise Unparsable(ErrorCode.INVALID_ENCODING, message)
        body = load_object(value)
    except Unparsable as error:
        raise _addressed(error, given) from None
    body |= {name: text for name, text in given.items() if body.get(name) is None}
    envelope = _envelope(body, value or b"", source)
    if out_of_range(envelope.id, source):
        message = f"job_id {envelope.job_id} was made too long before or after its record; use a fresh UUIDv7"
        raise _addressed(Unparsable(ErrorCode.JOB_ID_OUT_OF_RANGE, message), body)
    return Record(body, envelope)


def _envelope(body: dict[str, Any], value: bytes, source: Source) -> Envelope:
    tenant = _name(body, "tenant") or DEFAULT_TENANT
    job_id, batch_id, custom_id = _name(body, "job_id"), _name(body, "batch_id"), _name(body, "custom_id")
    inner = body.get("body")
    return Envelope(
        id=job_key(tenant, job_id, source, _name(body, "idempotency_key")),
        tenant=tenant,
        job_id=job_id,
        batch_id=batch_id,
        custom_id=custom_id,
        # A line of OpenAI's batch format names the model in its own body.
        model=_name(inner if isinstance(inner, dict) and "model" not in body else body, "model"),
        deadline=_deadline_or_none(body.get("deadline")),
        content_sha=_content_sha(body, (tenant, batch_id, custom_id), value),
        submitted_at=_from_seconds(max(source.timestamp_ms, 0) / 1000) or _EPOCH,
    )


def _name(body: dict[str, Any], field: str) -> str | None:
    name = body.get(field)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        return None
    return clean_text(name)


def _content_sha(body: dict[str, Any], names: tuple[str | None, ...], value: bytes) -> bytes:
    content = {name: item for name, item in body.items() if name not in NOT_CONTENT}
    try:
        canonical = orjson.dumps([names, content], option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Lone surrogates, which no canonical form has: the bytes as they came are content enough.
        canonical = orjson.dumps(names) + value
    return sha256(canonical).digest()


def parse_deadline(value: object) -> datetime:
    """A deadline in UTC, from RFC 3339 text with a zone or from seconds since the epoch.

    Raises ValueError for anything else, and for times before 2000: a number that small was meant as a duration.
    """
    deadline = None
    if isinstance(value, datetime):
        deadline = value
    elif isinstance(value, str):
        deadline = datetime.fromisoformat(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        deadline = _from_seconds(value)
    if deadline is None or deadline.tzinfo is None or deadline < _EARLIEST_DEADLINE:
        raise ValueError("no time that can be a deadline")
    try:
        return deadline.astimezone(UTC)
    except OverflowError:
        raise ValueError("out of range") from None


def _deadline_or_none(value: object) -> datetime | None:
    try:
        return None if value is None else parse_deadline(value)
    except ValueError:
        return None


def _from_seconds(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _from_headers(headers: Headers) -> tuple[dict[str, str], list[str]]:
    """The fields that headers name, and the headers that cannot be read: a name made up of one would be nobody's."""
    fields, unreadable = {}, []
    for name, value in headers or ():
        if name == UNREADABLE:
            unreadable.append("the name of a header")
        field = topics.FIELD_HEADERS.get(name)
        if field and value:
            try:
                fields[field] = value.decode()
            except UnicodeDecodeError:
                unreadable.append(f"the header {name}")
    return fields, unreadable


def submission_of(headers: Headers) -> str | None:
    """Which sending of its batch a record says that it is of, if any."""
    for name, value in headers or ():
        if name == topics.SUBMISSION and value:
            return clean_text(value.decode("utf-8", "replace"))[:MAX_ID_CHARS]
    return None


def _addressed(error: Unparsable, fields: dict[str, Any]) -> Unparsable:
    return Unparsable(
        error.code,
        error.message,
        tenant=_name(fields, "tenant") or DEFAULT_TENANT,
        batch_id=_name(fields, "batch_id"),
        custom_id=_name(fields, "custom_id"),
    )
