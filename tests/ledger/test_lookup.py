"""What a worker learns of the records that arrived."""

import pytest
from rows import attempt, body, job, jobs, named, outcome

from headrace.ledger import Ledger
from headrace.schemas import BatchOpened, CancelBatch, CancelJob, JobResult, JobState


def test_an_absent_job_is_answered_for(ledger: Ledger) -> None:
    row = job()
    seen = ledger.lookup([row], "w1")[row.id]
    assert (seen.state, seen.run, seen.attempt, seen.cancelled, seen.result) == (None, 1, 0, False, None)


def test_each_state_is_told_with_its_content(ledger: Ledger) -> None:
    queued, running, done = jobs(3)
    ledger.record([queued])
    ledger.begin([attempt(running)])
    ledger.finish([outcome(done)])
    seen = ledger.lookup([queued, running, done, queued], "w2")
    assert [seen[row.id].state for row in (queued, running, done)] == [
        JobState.QUEUED,
        JobState.RUNNING,
        JobState.SUCCEEDED,
    ]
    assert all(seen[row.id].content_sha == row.content_sha for row in (queued, running, done))
    result = seen[done.id].result
    assert result is not None
    assert JobResult.decode(result) == JobResult.decode(body(done))
    assert seen[queued.id].result is None


def test_jobs_whose_id_has_another_content_are_told_with_their_batch(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.ledger.queries.SENT_PAGE", 2)
    same, changed, elsewhere, absent = named("a"), named("b"), named("c", batch_id="b2"), job()
    ledger.record([same, changed, elsewhere])
    sent = {row.id: row.content_sha for row in (same, absent)}
    others = {row.id: b"other".ljust(32) for row in (changed, elsewhere)}
    assert ledger.other_content(sent | others) == {changed.id: "b1", elsewhere.id: "b2"}
    assert ledger.other_content(sent) == {}


def test_a_batch_is_cancelled_once_a_cancel_of_it_has_come(ledger: Ledger) -> None:
    ledger.apply_control(
        [BatchOpened(tenant="acme", batch_id="b1"), CancelBatch(tenant="other", batch_id="b1")]
    )
    assert not ledger.is_cancelled("acme", "b1")
    ledger.apply_control([CancelBatch(tenant="acme", batch_id="b1")])
    assert ledger.is_cancelled("acme", "b1")


@pytest.mark.parametrize("first", ["cancel", "job"])
def test_a_cancelled_job_is_told_whichever_came_first(ledger: Ledger, first: str) -> None:
    row, neighbour = named("x"), named("y")
    cancel = CancelJob(tenant="acme", job_id="x")
    if first == "job":
        ledger.record([row, neighbour])
    ledger.apply_control([cancel, cancel])
    ledger.apply_control([cancel])
    if first == "cancel":
        ledger.record([row, neighbour])
    seen = ledger.lookup([row, neighbour], "w1")
    assert seen[row.id].cancelled
    assert not seen[neighbour.id].cancelled


def test_a_cancelled_batch_is_told_before_its_jobs_have_rows(ledger: Ledger) -> None:
    row, other, nobodys = job(), job(batch_id="b2"), job(batch_id=None)
    theirs = job(tenant="other")
    ledger.apply_control([CancelBatch(tenant="acme", batch_id="b1")])
    seen = ledger.lookup([row, other, nobodys, theirs], "w1")
    assert [seen[each.id].cancelled for each in (row, other, nobodys, theirs)] == [True, False, False, False]


def test_a_batchs_deadline_is_told(ledger: Ledger) -> None:
    row = job()
    expires = row.submitted_at
    ledger.apply_control([BatchOpened(tenant="acme", batch_id="b1", expires_at=expires)])
    assert ledger.lookup([row], "w1")[row.id].expires_at == expires
