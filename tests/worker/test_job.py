"""Reading a record never raises: it is a job, a job with a problem, or no job."""

import pytest

from headrace.schemas import ErrorCode
from headrace.worker import job as worker_job
from headrace.worker.consumer import Delivery
from headrace.worker.job import Job, Rejection, read
from headrace.worker.offsets import Assignment

MODELS = frozenset({"m", "alias"})


def delivery(value: bytes | None) -> Delivery:
    return Delivery("bulk", Assignment("topic", 3), 42, 1_800_000_000_000, b"key", value, [])


def test_a_job_knows_where_it_came_from() -> None:
    job = read(
        delivery(b'{"prompt": "x", "deadline": 4000000000, "tenant": "acme", "model": "alias"}'),
        "pool",
        MODELS,
    )
    assert isinstance(job, Job)
    row = job.row
    assert (row.src_topic, row.src_partition, row.src_offset) == ("topic", 3, 42)
    assert (row.tier, row.pool, row.tenant, row.model) == ("bulk", "pool", "acme", "alias")
    assert (job.deadline_s, job.problem) == (4e9, None)
    assert job.expired(4e9)
    assert not job.expired(4e9 - 1)


def test_a_replayed_record_gets_the_same_id() -> None:
    first, second = (read(delivery(b'{"prompt": "x"}'), "pool", MODELS) for _ in range(2))
    assert isinstance(first, Job)
    assert isinstance(second, Job)
    assert first.row == second.row


def test_a_job_for_another_model_has_a_problem_that_lists_what_is_served() -> None:
    job = read(delivery(b'{"prompt": "x", "model": "other"}'), "pool", MODELS)
    assert isinstance(job, Job)
    assert job.problem is not None
    assert (job.problem.code, job.problem.param) == (ErrorCode.UNKNOWN_MODEL, "model")
    assert "alias, m" in job.problem.message


@pytest.mark.parametrize("value", [None, b"", b"[]", b"\xff"])
def test_what_is_no_object_is_rejected_at_its_place(value: bytes | None) -> None:
    rejection = read(delivery(value), "pool", MODELS)
    assert isinstance(rejection, Rejection)
    assert (rejection.row.src_topic, rejection.row.src_partition, rejection.row.src_offset) == (
        "topic",
        3,
        42,
    )


def broken(*_: object) -> None:
    raise ValueError("a secret prompt")


def test_a_job_that_a_defect_keeps_from_being_read_fails_under_its_own_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = delivery(b'{"prompt": "x", "batch_id": "b"}')
    well = read(record, "pool", MODELS)
    monkeypatch.setattr(worker_job, "parse_job", broken)
    job = read(record, "pool", MODELS)
    assert isinstance(well, Job)
    assert isinstance(job, Job)
    assert job.row == well.row
    assert job.request is None
    assert job.problem is not None
    assert job.problem.code == ErrorCode.INTERNAL_ERROR
    assert "secret" not in job.problem.message


def test_a_defect_in_reading_costs_one_record_and_quotes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(value: bytes, *_: object) -> None:
        raise ZeroDivisionError(value.decode())

    monkeypatch.setattr(worker_job, "parse_job", broken)
    rejection = read(delivery(b"a secret"), "pool", MODELS)
    assert isinstance(rejection, Rejection)
    assert rejection.row.code == ErrorCode.INTERNAL_ERROR
    assert "secret" not in rejection.row.message + caplog.text


def test_a_job_is_revoked_when_all_of_its_records_are() -> None:
    job = read(delivery(b'{"prompt": "x"}'), "pool", MODELS)
    assert isinstance(job, Job)
    again = delivery(b'{"prompt": "x"}')
    job.deliveries.append(again)
    job.deliveries[0].assignment.revoked = True
    assert not job.revoked
    again.assignment.revoked = True
    assert job.revoked
