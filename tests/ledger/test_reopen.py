"""A job that ended gets its next run, and a rejection is taken back, with counters that follow."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rows import attempt, job, outcome, query, rejection, state

from headrace.ledger import EndedJob, JobRow, Ledger, Letter
from headrace.schemas import BatchOpened, CancelJob, JobState


@pytest.fixture
def failed(ledger: Ledger) -> JobRow:
    """A job that ended as failed, in its first run and attempt."""
    row = job()
    ledger.begin([attempt(row)])
    ledger.finish([outcome(row, JobState.FAILED, error_code="engine_failure")])
    return row


def assert_counters_are_the_rows(ledger: Ledger, url: str) -> None:
    """What batch_counts and tier_counts say is what the rows say."""
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    rows = query(url, "SELECT state, count(*), sum(prompt_tokens) FROM job_status GROUP BY state")
    counted = {state: getattr(batch, state) for state in JobState if getattr(batch, state)}
    assert counted == {name: count for name, count, _ in rows}
    assert batch.prompt_tokens == sum(tokens for *_, tokens in rows)
    assert query(url, "SELECT count(*) FROM rejections WHERE NOT reopened") == [(batch.rejected,)]
    ((queued, running),) = query(
        url, "SELECT coalesce(sum(queued), 0)::int, coalesce(sum(running), 0)::int FROM tier_backlog"
    )
    assert (queued, running) == (batch.queued, batch.running)


def test_a_reopened_job_is_queued_in_its_next_run(ledger: Ledger, failed: JobRow, database_url: str) -> None:
    assert ledger.reopen([replace(failed, run=2)]) == 1
    status = ledger.job(failed.id)
    assert status is not None
    assert (status.state, status.run, status.attempt) == (JobState.QUEUED, 2, 0)
    assert (status.finished_at, status.error_code, status.error, status.prompt_tokens) == (
        None,
        None,
        None,
        0,
    )
    assert_counters_are_the_rows(ledger, database_url)


def test_the_next_run_ends_by_itself_and_the_former_result_is_kept(
    ledger: Ledger, failed: JobRow, database_url: str
) -> None:
    ledger.reopen([replace(failed, run=2)])
    assert failed.id in ledger.begin([attempt(failed, run=2)])
    assert_counters_are_the_rows(ledger, database_url)
    ledger.finish([outcome(failed, run=2)])
    assert state(ledger, failed.id) is JobState.SUCCEEDED
    assert_counters_are_the_rows(ledger, database_url)
    assert query(database_url, "SELECT run FROM results ORDER BY run") == [(1,), (2,)]


def test_reopening_twice_is_reopening_once(ledger: Ledger, failed: JobRow, database_url: str) -> None:
    asked = replace(failed, run=2)
    assert [ledger.reopen([asked]) for _ in range(2)] == [1, 0]
    ledger.begin([attempt(failed, run=2)])
    assert ledger.reopen([asked]) == 0
    ledger.finish([outcome(failed, run=2)])
    assert ledger.reopen([asked]) == 0  # the record that asked for run 2 has been answered
    assert state(ledger, failed.id) is JobState.SUCCEEDED
    assert_counters_are_the_rows(ledger, database_url)


@pytest.mark.parametrize("asked", [{"run": 3}, {"run": 1}, {"run": 2, "content_sha": b"x" * 32}])
def test_only_the_next_run_of_the_same_content_opens_a_job(
    ledger: Ledger, failed: JobRow, asked: dict[str, object]
) -> None:
    assert ledger.reopen([replace(failed, **asked)]) == 0
    assert state(ledger, failed.id) is JobState.FAILED


def test_a_job_that_has_not_ended_is_left_alone(ledger: Ledger, database_url: str) -> None:
    row = job()
    ledger.record([row])
    assert ledger.reopen([replace(row, run=2), replace(job(), run=2)]) == 0
    assert state(ledger, row.id) is JobState.QUEUED
    assert_counters_are_the_rows(ledger, database_url)


def test_nothing_of_the_former_run_touches_the_next(ledger: Ledger, failed: JobRow) -> None:
    ledger.reopen([replace(failed, run=2)])
    late = ledger.finish([outcome(failed)])  # a zombie with run 1's answer
    assert (late.changed, dict(late.winners)) == (frozenset(), {})
    assert failed.id not in ledger.begin([attempt(failed, attempt=2)])
    assert state(ledger, failed.id) is JobState.QUEUED


def test_the_recorder_opens_a_job_whose_record_came_again(ledger: Ledger, failed: JobRow) -> None:
    assert ledger.record([replace(failed, run=2)]) == 0
    assert state(ledger, failed.id) is JobState.QUEUED


def test_a_rejection_is_taken_back_and_may_come_again(ledger: Ledger, database_url: str) -> None:
    row = rejection()
    again = replace(row, run=2)
    ledger.reject([row])
    assert ledger.reopen([again]) == 1
    assert ledger.rejections("acme", "b1") == []
    assert ledger.reject([row]) == 0  # the first record, read once more
    assert_counters_are_the_rows(ledger, database_url)
    assert ledger.reject([again]) == 1
    assert ledger.reject([again]) == 0
    assert ledger.rejections("acme", "b1") == [again]
    assert_counters_are_the_rows(ledger, database_url)


def test_a_record_rejected_again_before_anybody_reopened_it_counts_once(
    ledger: Ledger, database_url: str
) -> None:
    row = rejection()
    ledger.reject([row])
    ledger.reject([replace(row, run=2)])
    assert ledger.reopen([replace(row, run=2)]) == 0
    assert_counters_are_the_rows(ledger, database_url)


def test_a_rejected_record_that_is_a_job_after_all_counts_as_one(ledger: Ledger, database_url: str) -> None:
    row = rejection()
    ledger.reject([row])
    ledger.record(
        [job(src_topic=row.src_topic, src_partition=row.src_partition, src_offset=row.src_offset, run=2)]
    )
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.rejected) == (1, 0)
    assert_counters_are_the_rows(ledger, database_url)


def test_the_ended_jobs_of_a_batch_are_listed_by_state(ledger: Ledger, failed: JobRow) -> None:
    good, waiting = job(), job()
    ledger.finish([outcome(good)])
    ledger.record([waiting])
    assert list(ledger.ended("acme", "b1", [JobState.FAILED])) == [[EndedJob(failed)]]
    both = [
        each.job.id
        for page in ledger.ended("acme", "b1", [JobState.FAILED, JobState.SUCCEEDED])
        for each in page
    ]
    assert both == sorted([failed.id, good.id])


PAST, AHEAD = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))


@pytest.mark.parametrize(
    ("deadline", "of_batch", "cancelled", "bound_for"),
    [
        (None, None, False, None),
        (AHEAD, AHEAD, False, None),
        (PAST, None, False, JobState.EXPIRED),
        (None, PAST, False, JobState.EXPIRED),
        (AHEAD, PAST, False, None),  # a deadline of the job's own counts alone
        (None, None, True, JobState.CANCELLED),
        (PAST, PAST, True, JobState.CANCELLED),
    ],
)
def test_an_ended_job_tells_what_alone_its_next_run_could_come_to(
    ledger: Ledger,
    deadline: datetime | None,
    of_batch: datetime | None,
    cancelled: bool,
    bound_for: JobState | None,
) -> None:
    row, other = job(deadline=deadline), job(deadline=AHEAD)
    ledger.finish([outcome(row), outcome(other)])
    ledger.apply_control([BatchOpened(tenant="acme", batch_id="b1", expires_at=of_batch)])
    ledger.apply_control([CancelJob(tenant="acme", id=row.id)] if cancelled else [])
    (page,) = ledger.ended("acme", "b1", [JobState.SUCCEEDED])
    told = {each.job.id: each.bound_for for each in page}
    assert told == {row.id: bound_for, other.id: None}
    # The same is told of records that are yet to come, and nothing of those that are no jobs.
    assert ledger.bound_for([other, row, rejection()]) == ({row: bound_for} if bound_for else {})
    assert ledger.bound_for([rejection()]) == {}


def test_a_letter_that_was_sent_back_stays_so_and_a_dropped_one_may_be_sent_back(ledger: Ledger) -> None:
    letter = Letter("dead", 0, 7, datetime.now(UTC))
    made_again = replace(letter, written_at=letter.written_at + timedelta(days=1))
    ledger.settle([letter], "replayed")
    ledger.settle([letter, made_again], "dropped")
    assert ledger.settled("dead") == {letter: "replayed", made_again: "dropped"}
    assert ledger.settled("other") == {}
    ledger.settle([made_again], "replayed")
    assert ledger.settled("dead") == {letter: "replayed", made_again: "replayed"}
