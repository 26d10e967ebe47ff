"""What was cancelled lately is remembered, within bounds."""

from headrace.schemas import CancelBatch, CancelJob, uuid7
from headrace.worker.control import Cancels


def test_a_cancel_covers_its_job_or_its_batch_and_no_other_tenants() -> None:
    cancels, job = Cancels(), uuid7()
    cancels.add(CancelJob(id=job))
    cancels.add(CancelBatch(tenant="acme", batch_id="b"))
    assert cancels.cover(job, "any", None)
    assert cancels.cover(uuid7(), "acme", "b")
    assert not cancels.cover(uuid7(), "other", "b")
    assert not cancels.cover(uuid7(), "acme", None)


def test_only_the_newest_cancels_are_kept() -> None:
    cancels = Cancels(most=2)
    jobs = [uuid7() for _ in range(3)]
    for job in jobs[:2]:
        cancels.add(CancelJob(id=job))
    cancels.add(CancelJob(id=jobs[0]))  # again: newer than the second now
    cancels.add(CancelJob(id=jobs[2]))
    assert [cancels.cover(job, "t", None) for job in jobs] == [True, False, True]
