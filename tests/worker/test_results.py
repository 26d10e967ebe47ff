"""What a worker makes of a result that the job table has already."""

from headrace.schemas import ErrorCode, JobError, JobResult, JobState, uuid7
from headrace.worker.results import dead_letter_reason


def test_a_stored_failure_of_ours_belongs_on_the_dead_letter_topic() -> None:
    for code in (ErrorCode.ENGINE_FAILURE, ErrorCode.INTERNAL_ERROR):
        error = JobError(code=code, message="it died")
        assert dead_letter_reason(JobResult(id=uuid7(), state=JobState.FAILED, error=error).encode()) == error
    error = JobError(code=ErrorCode.UNKNOWN_MODEL, message="no")
    assert dead_letter_reason(JobResult(id=uuid7(), state=JobState.FAILED, error=error).encode()) is None


def test_a_stored_result_of_another_version_is_no_reason_to_end_the_worker() -> None:
    assert dead_letter_reason(b'{"state": "failed", "error": "in words"}') is None
