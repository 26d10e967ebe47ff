"""What the recorder inserts."""

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from rows import attempt, job, jobs, named, outcome, query, rejection, state

from headrace.ledger import Ledger
from headrace.schemas import JobState, uuid7


def test_a_new_job_is_queued_and_counted(ledger: Ledger) -> None:
    row = job(job_id="j-1", custom_id="line 1", model="m", pool="small", tier="bulk")
    assert ledger.record([row]) == 1
    stored = ledger.job(row.id)
    assert stored is not None
    assert (stored.state, stored.run, stored.attempt) == (JobState.QUEUED, 1, 0)
    assert (stored.job_id, stored.custom_id, stored.model, stored.pool, stored.tier) == (
        "j-1",
        "line 1",
        "m",
        "small",
        "bulk",
    )
    assert stored.submitted_at == row.submitted_at
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.queued, batch.done) == (1, 1, 0)


def test_recording_again_changes_nothing(ledger: Ledger) -> None:
    rows = jobs(5)
    assert ledger.record(rows) == 5
    assert ledger.record(rows) == 0
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.rejected) == (5, 0)


def test_a_late_recorder_changes_nothing(ledger: Ledger) -> None:
    row = job()
    ledger.begin([attempt(row)])
    ledger.finish([outcome(row)])
    before = (ledger.job(row.id), ledger.batch("acme", "b1"), ledger.backlog())
    assert ledger.record([row]) == 0
    assert (ledger.job(row.id), ledger.batch("acme", "b1"), ledger.backlog()) == before


def test_the_same_job_twice_in_one_call_is_one_job(ledger: Ledger) -> None:
    row = job()
    again = replace(row, src_offset=row.src_offset + 1000)
    assert ledger.record([row, again]) == 1
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.rejected) == (1, 0)


def test_the_same_id_with_other_content_is_rejected_and_touches_nothing(ledger: Ledger) -> None:
    first = named("report", "one")
    second, third = named("report", "two"), named("report", "three")
    ledger.record([first, second])  # both in one call
    ledger.record([third])  # and one later
    stored = ledger.job(first.id)
    assert stored is not None
    assert stored.submitted_at == first.submitted_at
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.rejected) == (1, 2)
    rejected = ledger.rejections("acme", "b1")
    assert [row.src_offset for row in rejected] == [second.src_offset, third.src_offset]
    assert {row.code for row in rejected} == {"duplicate_job_id"}


def test_an_impostor_in_front_does_not_make_its_victim_one(ledger: Ledger) -> None:
    first = named("report", "one")
    ledger.record([first])
    impostor, again = named("report", "two"), named("report", "one")
    ledger.record([impostor, again])
    (told,) = ledger.rejections("acme", "b1")
    assert told.src_offset == impostor.src_offset


def test_a_rejection_reported_by_recorder_and_worker_counts_once(ledger: Ledger) -> None:
    row = rejection()
    ledger.record([], [row])
    assert ledger.reject([row, row]) == 0
    assert ledger.reject([row, rejection()]) == 1
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.rejected == 2


def test_a_rejection_without_a_batch_is_kept(ledger: Ledger, database_url: str) -> None:
    ledger.reject([rejection(batch_id=None, code="empty_value")])
    assert query(database_url, "SELECT code FROM rejections") == [("empty_value",)]
    assert query(database_url, "SELECT * FROM batches") == []


def test_ids_of_days_that_the_table_does_not_keep_are_rejected(ledger: Ledger) -> None:
    old, far, good = (
        job(id=uuid7(1_000_000_000_000)),
        job(id=UUID("7fffffff-ffff-7000-8000-000000000000")),
        job(),
    )
    assert not ledger.keeps(old.id)
    assert not ledger.keeps(far.id)
    assert ledger.record([old, good, far]) == 1
    assert state(ledger, good.id) is JobState.QUEUED
    assert {row.code for row in ledger.rejections("acme", "b1")} == {"job_id_out_of_range"}


def test_named_ids_are_always_kept(ledger: Ledger) -> None:
    row = named("anything at all")
    assert row.id.bytes[0] == 0xFF
    assert ledger.keeps(row.id)
    assert ledger.record([row]) == 1
    assert state(ledger, row.id) is JobState.QUEUED


def test_jobs_of_two_days_land_on_either_side_of_midnight(ledger: Ledger, database_url: str) -> None:
    now = job().submitted_at
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    ms = int(midnight.timestamp() * 1000)
    before, after = job(id=uuid7(ms - 1)), job(id=uuid7(ms))
    ledger.record([after, before])
    placed = query(database_url, "SELECT id, tableoid::regclass::text FROM jobs ORDER BY id")
    assert placed == [
        (before.id, f"jobs_{midnight - timedelta(days=1):%Y%m%d}"),
        (after.id, f"jobs_{midnight:%Y%m%d}"),
    ]


def test_nothing_to_record_is_no_error(ledger: Ledger) -> None:
    assert ledger.record([]) == 0
    assert ledger.reject([]) == 0
    assert ledger.begin([]).started == frozenset()
    assert ledger.finish([]).changed == frozenset()
    assert ledger.lookup([], "w1") == {}
    ledger.apply_control([])
    ledger.end_attempts("w1", [])
