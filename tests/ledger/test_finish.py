"""The guarded write that ends a job."""

from dataclasses import replace

import pytest
from rows import attempt, body, job, jobs, named, outcome, query, state

from headrace.ledger import Ledger
from headrace.schemas import JobResult, JobState

TERMINAL = [state for state in JobState if state.terminal]


@pytest.mark.parametrize("end", TERMINAL)
def test_a_running_job_ends_once_with_its_result(ledger: Ledger, end: JobState) -> None:
    row = job(custom_id="c")
    ledger.record([row])
    ledger.begin([attempt(row)])
    done = ledger.finish([outcome(row, end, error_code="code", error="why")])
    assert done.changed == {row.id}
    stored = ledger.job(row.id)
    assert stored is not None
    assert (stored.state, stored.error_code, stored.error) == (end, "code", "why")
    assert (stored.prompt_tokens, stored.completion_tokens) == (10, 3)
    assert stored.finished_at is not None
    result = ledger.result(row.id)
    assert result is not None
    assert result.body is not None
    assert JobResult.decode(result.body) == JobResult.decode(body(row, end))
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert getattr(batch, end) == 1
    assert (batch.submitted, batch.queued, batch.running, batch.done) == (1, 0, 0, 1)
    assert (batch.prompt_tokens, batch.completion_tokens) == (10, 3)


def test_a_terminal_job_is_never_touched_again(ledger: Ledger) -> None:
    row = job()
    ledger.finish([outcome(row)])
    before = (ledger.job(row.id), ledger.batch("acme", "b1"))
    again = ledger.finish([outcome(row, JobState.FAILED, prompt_tokens=99)])
    assert again.changed == frozenset()
    assert JobResult.decode(again.winners[row.id]).state is JobState.SUCCEEDED
    assert (ledger.job(row.id), ledger.batch("acme", "b1")) == before


def test_a_job_may_end_before_the_recorder_saw_it(ledger: Ledger) -> None:
    row = job()
    assert ledger.finish([outcome(row, JobState.EXPIRED, attempt=0)]).changed == {row.id}
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.expired, batch.running, batch.queued) == (1, 1, 0, 0)


def test_a_queued_job_may_end_without_being_started(ledger: Ledger) -> None:
    row = job()
    ledger.record([row])
    ledger.finish([outcome(row, JobState.CANCELLED, attempt=0)])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.cancelled, batch.running, batch.queued) == (1, 0, 0)


def test_new_running_queued_and_ended_jobs_end_in_one_call(ledger: Ledger) -> None:
    new, queued, running, ended = jobs(4)
    ledger.record([queued, running])
    ledger.begin([attempt(running)])
    ledger.finish([outcome(ended, JobState.FAILED)])
    done = ledger.finish([outcome(row) for row in (new, queued, running, ended)])
    assert done.changed == {new.id, queued.id, running.id}
    assert set(done.winners) == {ended.id}
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.succeeded, batch.failed, batch.queued, batch.running) == (4, 3, 1, 0, 0)


def test_the_same_job_twice_in_one_call_ends_as_the_first_says(ledger: Ledger) -> None:
    row = job()
    done = ledger.finish([outcome(row), outcome(row, JobState.FAILED)])
    assert done.changed == {row.id}
    assert state(ledger, row.id) is JobState.SUCCEEDED


def test_a_job_of_other_content_is_neither_ended_nor_answered_for(ledger: Ledger) -> None:
    row = named("x", "one")
    ledger.record([row])
    done = ledger.finish([outcome(named("x", "two"))])
    assert not done.changed
    assert not done.winners
    assert state(ledger, row.id) is JobState.QUEUED
    ledger.finish([outcome(row)])
    assert not ledger.finish([outcome(named("x", "two"))]).winners


def test_a_stale_run_touches_nothing(ledger: Ledger, database_url: str) -> None:
    import psycopg

    row = job()
    ledger.record([row])
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE jobs SET run = 2")
    done = ledger.finish([outcome(row, run=1)])
    assert not done.changed
    assert not done.winners
    assert ledger.finish([outcome(row, run=2)]).changed == {row.id}


def test_a_zombie_may_end_a_job_that_nobody_ended(ledger: Ledger, database_url: str) -> None:
    row = job()
    ledger.begin([attempt(row, "w1")])
    ledger.begin([attempt(row, "w2", attempt=2)])
    assert ledger.finish([outcome(row, attempt=1)]).changed == {row.id}
    late = ledger.finish([outcome(row, JobState.FAILED, attempt=2)])
    assert not late.changed
    assert JobResult.decode(late.winners[row.id]).state is JobState.SUCCEEDED
    assert query(database_url, "SELECT count(*) FROM attempts WHERE ended_at IS NULL") == [(0,)]
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.running, batch.succeeded) == (0, 1)


def test_a_result_kept_elsewhere_is_stored_by_reference(ledger: Ledger) -> None:
    row = job()
    ledger.finish([outcome(row, uri="s3://bucket/x", size=5_000_000, sha256=b"\1" * 32)])
    result = ledger.result(row.id)
    assert result is not None
    assert result.uri == "s3://bucket/x"
    assert JobResult.decode(ledger.finish([outcome(row)]).winners[row.id]).id == row.id


def test_token_counts_beyond_32_bits_add_up(ledger: Ledger) -> None:
    big = 3_000_000_000
    ledger.finish([outcome(row, prompt_tokens=big) for row in jobs(3)])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.prompt_tokens == 3 * big


def test_batches_and_tenants_are_counted_apart(ledger: Ledger) -> None:
    ours, theirs, none = job(), job(tenant="other"), job(batch_id=None)
    ledger.finish([outcome(row) for row in (ours, theirs, none, replace(job(), batch_id="b2"))])
    for tenant, batch_id in [("acme", "b1"), ("other", "b1"), ("acme", "b2")]:
        batch = ledger.batch(tenant, batch_id)
        assert batch is not None
        assert batch.succeeded == 1
    assert state(ledger, none.id) is JobState.SUCCEEDED
