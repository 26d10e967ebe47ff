"""What a worker makes of a result: of one that the job table has already, and of one too large for a message."""

import json

import pytest

from headrace.schemas import ErrorCode, JobError, JobResult, JobState, uuid7
from headrace.worker.consumer import Delivery
from headrace.worker.job import Job, read
from headrace.worker.offsets import Assignment
from headrace.worker.results import dead_letter_reason, outcome


def test_a_stored_failure_of_ours_belongs_on_the_dead_letter_topic() -> None:
    for code in (ErrorCode.ENGINE_FAILURE, ErrorCode.INTERNAL_ERROR):
        error = JobError(code=code, message="it died")
        assert dead_letter_reason(JobResult(id=uuid7(), state=JobState.FAILED, error=error).encode()) == error
    error = JobError(code=ErrorCode.UNKNOWN_MODEL, message="no")
    assert dead_letter_reason(JobResult(id=uuid7(), state=JobState.FAILED, error=error).encode()) is None


def test_a_stored_result_of_another_version_is_no_reason_to_end_the_worker() -> None:
    assert dead_letter_reason(b'{"state": "failed", "error": "in words"}') is None


@pytest.mark.parametrize(
    ("record", "param", "encoding"),
    [
        ({"inputs": ["a", "b"], "embedding": {}}, "inputs", "embedding.encoding_format"),
        (
            {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": ["a", "b"]}},
            "body.input",
            "body.encoding_format",
        ),
    ],
    ids=["ours", "openai"],
)
def test_too_large_a_result_of_many_inputs_is_refused_with_what_makes_it_smaller(
    record: dict[str, object], param: str, encoding: str
) -> None:
    delivery = Delivery(
        "bulk", Assignment("t", 0), 7, 1_800_000_000_000, None, json.dumps(record).encode(), []
    )
    job = read(delivery, "pool", frozenset())
    assert isinstance(job, Job)
    result = JobResult(id=job.row.id, state=JobState.SUCCEEDED)
    row, large = outcome(job, result, max_bytes=10, store=None)
    error = JobResult.decode(row.body).error
    assert large is None
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.RESULT_TOO_LARGE, param)
    assert f"send fewer inputs a line, or set {encoding} to base64" in error.message
    assert "HEADRACE_RESULT_STORE" in error.message
