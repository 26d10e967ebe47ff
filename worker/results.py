"""A result on its way out: the row that the job table gets, and the record that the results topic gets."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256

from headrace.ledger.rows import OutcomeRow
from headrace.schemas import (
    ErrorCode,
    JobError,
    JobResult,
    JobState,
    Reference,
    UnreadableResult,
    clean_text,
    topics,
)
from headrace.schemas.trace import trace_of
from headrace.store import Store
from headrace.worker import translate
from headrace.worker.job import Job
from headrace.worker.publisher import Form, Headers, Publication

FOR_PEOPLE = {ErrorCode.ENGINE_FAILURE, ErrorCode.NON_FINITE_VALUES, ErrorCode.INTERNAL_ERROR}
"""Failures that say something of us and not of the job: their records are dead letters, and too many of them brake."""


@dataclass(frozen=True, slots=True)
class LargeBody:
    """A result too large for a message, and its name in the results store."""

    name: str
    body: bytes


def outcome(
    job: Job, result: JobResult, max_bytes: int, store: Store | None
) -> tuple[OutcomeRow, LargeBody | None]:
    """The row of a result, and what has to be in the store before the row is written.

    A result too large for a message is referred to. Without a store it fails here, before anything says otherwise.
    """
    body, large = result.encode(), None
    if len(body) > max_bytes:
        if store is None:
            result = _too_large(job, result, len(body), max_bytes)
        else:
            large, reference = _refer(result, body, store)
            result = result.kept_at(reference)
        body = result.encode()
    return _row(job, result, body), large


def _refer(result: JobResult, body: bytes, store: Store) -> tuple[LargeBody, Reference]:
    digest = sha256(body).hexdigest()
    day = result.timings.submitted_at or datetime.fromtimestamp(0, UTC)
    # By content as well: two attempts may both get this far, and the table then says whose body counts.
    large = LargeBody(f"{day:%Y-%m-%d}/{result.id}-{result.run}-{digest[:16]}.json", body)
    return large, Reference(uri=store.uri(large.name), bytes=len(body), sha256=digest)


def _row(job: Job, result: JobResult, body: bytes) -> OutcomeRow:
    reference = result.result_ref
    return OutcomeRow(
        job=job.row,
        state=result.state,
        body=body,
        run=result.run,
        attempt=result.attempt,
        prompt_tokens=result.usage.prompt_tokens,
        cached_tokens=result.usage.cached_tokens,
        completion_tokens=result.usage.completion_tokens,
        error_code=None if result.error is None else result.error.code,
        error=None if result.error is None else clean_text(result.error.message),
        uri=None if reference is None else reference.uri,
        size=None if reference is None else reference.bytes,
        sha256=None if reference is None else bytes.fromhex(reference.sha256),
    )


def result_record(topic: str, job: Job, body: bytes) -> Publication:
    """The record of a result: keyed by the job's id, with its content's hash and the trace that came with the job."""
    row = job.row
    names = ((topics.TENANT, row.tenant), (topics.BATCH_ID, row.batch_id), (topics.CUSTOM_ID, row.custom_id))
    headers: Headers = [(topics.CONTENT_TYPE, topics.JSON)]
    headers += [(name, text.encode("utf-8", "replace")) for name, text in names if text is not None]
    headers.append((topics.CONTENT, row.content_sha.hex().encode()))
    headers += trace_of(job.deliveries[0].headers)
    return Publication(topic, str(row.id).encode(), body, headers, job, smaller=_smaller)


def _smaller(record: Publication) -> Publication | None:
    """What is published of a result that the topic does not take: without its trace, then without its answers.

    The job table has the whole of it, under the same state, and stays as it is.
    """
    traceless = [(name, value) for name, value in record.headers if name not in topics.TRACE_HEADERS]
    if len(traceless) < len(record.headers):
        return replace(record, headers=traceless, form=Form.WITHOUT_TRACE)
    if record.form is Form.WITHOUT_ANSWER:
        return None
    try:
        result = JobResult.decode(record.value or b"")
    except UnreadableResult:  # another version's
        return None
    if result.state is not JobState.SUCCEEDED or result.result_ref is not None:
        return None  # it has no answers
    body = result.not_published(record.size).encode()
    return replace(record, value=body, form=Form.WITHOUT_ANSWER)


def dead_letter_reason(body: bytes) -> JobError | None:
    """Why a job with this stored result belongs on the dead-letter topic too; None if it does not."""
    result = _read(body)
    return None if result is None else for_people(result.error)


def is_of(body: bytes, worker: str, attempt: int) -> bool:
    """Whether a job's stored result is what this worker, whose name no other ever has, made of this attempt."""
    result = _read(body)
    return result is not None and (result.worker, result.attempt) == (worker, attempt)


def _read(body: bytes) -> JobResult | None:
    """A stored result; None for another version's: it is published as it is, and no reason to end the worker each time."""
    try:
        return JobResult.decode(body)
    except UnreadableResult:
        return None


def for_people(error: JobError | None) -> JobError | None:
    """The error, if it is one that makes a dead letter."""
    return error if error is not None and error.code in FOR_PEOPLE else None


def _too_large(job: Job, result: JobResult, size: int, max_bytes: int) -> JobResult:
    request = job.request
    field, less = "max_tokens", "ask for fewer tokens"
    if request is not None and request.inputs is not None:
        encoding = request.path_of("embedding.encoding_format")
        field, less = "inputs", f"send fewer inputs a line, or set {encoding} to base64"
    message = (
        f"the result has {size:,} bytes, of which {max_bytes:,} fit a message: {less}, or have the"
        " workers keep large results (HEADRACE_RESULT_STORE)"
    )
    param = None if request is None else request.path_of(field)
    error = JobError(code=ErrorCode.RESULT_TOO_LARGE, message=message, param=param)
    failed = translate.unsuccessful(
        job.envelope,
        JobState.FAILED,
        error,
        job=job.request,
        worker=result.worker,
        run=result.run,
        attempt=result.attempt,
    )
    return failed.model_copy(update={"usage": result.usage})
