"""A result on its way out: the row that the job table gets, and the record that the results topic gets."""

from headrace.ledger.rows import OutcomeRow
from headrace.schemas import ErrorCode, JobError, JobResult, JobState, clean_text, topics
from headrace.worker import translate
from headrace.worker.job import Job
from headrace.worker.publisher import Headers, Publication


def outcome(job: Job, result: JobResult, max_bytes: int) -> OutcomeRow:
    """The row of a result. One too large for Kafka fails here, before anything is written that says otherwise."""
    body = result.encode()
    if len(body) > max_bytes:
        result = _too_large(job, result, len(body), max_bytes)
        body = result.encode()
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
    )


def result_record(topic: str, job: Job, body: bytes) -> Publication:
    """The record of a result: keyed by the job's id, with the trace that came with the job."""
    row = job.row
    names = ((topics.TENANT, row.tenant), (topics.BATCH_ID, row.batch_id), (topics.CUSTOM_ID, row.custom_id))
    headers: Headers = [(topics.CONTENT_TYPE, topics.JSON)]
    headers += [(name, text.encode("utf-8", "replace")) for name, text in names if text is not None]
    traced = (topics.TRACEPARENT, topics.TRACESTATE)
    headers += [(name, value) for name, value in job.deliveries[0].headers if name in traced]
    return Publication(topic, str(row.id).encode(), body, headers, job)


def dead_letter_reason(body: bytes) -> JobError | None:
    """Why a job with this stored result belongs on the dead-letter topic too; None if it does not."""
    error = JobResult.decode(body).error
    return error if error is not None and error.code == ErrorCode.ENGINE_FAILURE else None


def _too_large(job: Job, result: JobResult, size: int, max_bytes: int) -> JobResult:
    message = f"the result has {size:,} bytes; at most {max_bytes:,} fit a message; ask for fewer tokens"
    param = None if job.request is None else job.request.path_of("max_tokens")
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
