"""What a worker makes of a result: of one that the job table has already, and of one too large for a message."""

import json

import pytest

from headrace.schemas import Choice, ErrorCode, JobError, JobResult, JobState, Reference, uuid7
from headrace.worker.consumer import Delivery
from headrace.worker.job import Job, read
from headrace.worker.offsets import Assignment
from headrace.worker.publisher import Form, Publication
from headrace.worker.results import _smaller, dead_letter_reason, outcome, result_record


def test_a_stored_failure_of_ours_belongs_on_the_dead_letter_topic() -> None:
    for code in (ErrorCode.ENGINE_FAILURE, ErrorCode.NON_FINITE_VALUES, ErrorCode.INTERNAL_ERROR):
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


def forms(job: Job, result: JobResult) -> list[Publication]:
    """The record of a result, and what is published in its place as long as Kafka refuses that."""
    record: Publication | None = result_record("results", job, result.encode())
    found = []
    while record is not None:
        found.append(record)
        record = record.smaller and record.smaller(record)
    return found


def test_a_result_that_is_refused_loses_its_trace_first_and_then_its_answers(job: Job) -> None:
    job.deliveries[0].headers.append(
        ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    )
    choices = [Choice(text="Paris", finish_reason="stop")]
    answered = JobResult(id=uuid7(), state=JobState.SUCCEEDED, choices=choices, embedding=[1.0])
    whole, traceless, empty = forms(job, answered)
    assert [form.form for form in (whole, traceless, empty)] == list(Form)[:3]
    assert traceless.value == whole.value
    assert "traceparent" in dict(whole.headers)
    assert traceless.headers == empty.headers == [h for h in whole.headers if h[0] != "traceparent"]
    left = JobResult.decode(empty.value or b"")
    assert (left.state, left.choices, left.embedding) == (JobState.SUCCEEDED, [], None)
    assert left.error is not None
    assert left.error.code == ErrorCode.RESULT_TOO_LARGE
    assert left.to_openai()["response"] is None


def test_what_has_no_answers_has_no_smaller_form(job: Job) -> None:
    error = JobError(code=ErrorCode.UNKNOWN_MODEL, message="no")
    reference = Reference(uri="file:///r/1.json", bytes=1, sha256="0" * 64)
    for result in (
        JobResult(id=uuid7(), state=JobState.FAILED, error=error),
        JobResult(id=uuid7(), state=JobState.SUCCEEDED, result_ref=reference),
    ):
        assert len(forms(job, result)) == 1
    assert _smaller(result_record("results", job, b"of another version")) is None
