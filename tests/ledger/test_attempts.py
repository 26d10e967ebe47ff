"""What a worker writes before it runs a job, and what others make of it."""

from rows import attempt, job, jobs, outcome, query, state

from headrace.ledger import Ledger
from headrace.schemas import JobState


def test_begin_makes_a_queued_job_run(ledger: Ledger) -> None:
    row = job()
    ledger.record([row])
    assert row.id in ledger.begin([attempt(row)])
    stored = ledger.job(row.id)
    assert stored is not None
    assert (stored.state, stored.attempt) == (JobState.RUNNING, 1)
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.queued, batch.running) == (0, 1)


def test_begin_makes_the_row_that_the_recorder_has_not(ledger: Ledger) -> None:
    row = job()
    assert row.id in ledger.begin([attempt(row)])
    ledger.record([row])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.queued, batch.running) == (1, 0, 1)


def test_of_two_workers_with_the_same_attempt_one_may_run(ledger: Ledger) -> None:
    row = job()
    ledger.record([row])
    assert row.id in ledger.begin([attempt(row, "w1")])
    assert row.id not in ledger.begin([attempt(row, "w2")])
    assert row.id in ledger.begin([attempt(row, "w2", attempt=2)])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.running == 1


def test_beginning_again_after_a_lost_answer_says_yes_again(ledger: Ledger, database_url: str) -> None:
    rows = [attempt(row) for row in jobs(3)]
    assert ledger.begin(rows) == ledger.begin(rows)
    assert query(database_url, "SELECT count(*) FROM attempts") == [(3,)]
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.running) == (3, 3)


def test_a_terminal_job_is_never_begun(ledger: Ledger) -> None:
    row = job()
    ledger.finish([outcome(row, JobState.CANCELLED, attempt=0)])
    assert row.id not in ledger.begin([attempt(row)])
    assert state(ledger, row.id) is JobState.CANCELLED


def test_a_job_of_other_content_is_never_begun(ledger: Ledger, database_url: str) -> None:
    row = job()
    ledger.record([row])
    other = job("other content", id=row.id)
    assert row.id not in ledger.begin([attempt(other)])
    assert state(ledger, row.id) is JobState.QUEUED
    assert query(database_url, "SELECT * FROM attempts") == []


def test_the_same_job_twice_in_one_call_begins_once(ledger: Ledger, database_url: str) -> None:
    row = job()
    assert ledger.begin([attempt(row), attempt(row)]).started == {row.id}
    assert query(database_url, "SELECT count(*) FROM attempts") == [(1,)]


def test_finishing_ends_the_attempt(ledger: Ledger, database_url: str) -> None:
    row = job()
    ledger.begin([attempt(row)])
    ledger.finish([outcome(row)])
    assert query(database_url, "SELECT ended_at IS NOT NULL, died FROM attempts") == [(True, False)]


def test_a_live_workers_attempt_is_seen_by_others(ledger: Ledger) -> None:
    row = job()
    ledger.heartbeat("w1", "default", "m", ttl=60)
    ledger.begin([attempt(row, "w1")])
    seen = ledger.lookup([row], "w2")[row.id]
    assert (seen.live_elsewhere, seen.suspect, seen.attempt) == (True, 0, 1)
    ledger.end_attempts("w1", [row.id])
    seen = ledger.lookup([row], "w2")[row.id]
    assert (seen.live_elsewhere, seen.suspect) == (False, 0)


def test_a_dead_workers_attempt_makes_a_suspect(ledger: Ledger) -> None:
    row = job()
    ledger.heartbeat("w1", "default", "m", ttl=60)
    ledger.begin([attempt(row, "w1")])
    ledger.leave("w1")
    seen = ledger.lookup([row], "w2")[row.id]
    assert (seen.live_elsewhere, seen.suspect, seen.deaths_alone, seen.group_size) == (False, 1, 0, 0)


def test_a_worker_that_never_gave_a_sign_of_life_counts_as_dead(ledger: Ledger) -> None:
    row = job()
    ledger.begin([attempt(row, "ghost")])
    assert ledger.lookup([row], "w2")[row.id].suspect == 1


def test_deaths_are_counted_with_the_size_of_their_group(ledger: Ledger) -> None:
    row = job()
    for number, size in enumerate([0, 8, 4, 1], start=1):
        assert row.id in ledger.begin([attempt(row, f"w{number}", attempt=number, group_size=size)])
    seen = ledger.lookup([row], "w9")[row.id]
    assert (seen.suspect, seen.deaths_alone, seen.group_size) == (4, 1, 1)


def test_an_engines_death_makes_suspects_while_its_worker_lives(ledger: Ledger) -> None:
    row, other = jobs(2)
    ledger.heartbeat("w1", "default", "m", ttl=60)
    ledger.begin([attempt(row, "w1"), attempt(other, "w1")])
    ledger.end_attempts("w1", [row.id], died=True)
    ledger.end_attempts("w2", [other.id], died=True)  # not its own: nothing happens
    seen = ledger.lookup([row, other], "w2")
    assert (seen[row.id].suspect, seen[row.id].live_elsewhere) == (1, False)
    assert (seen[other.id].suspect, seen[other.id].live_elsewhere) == (0, True)


def test_failures_are_counted_apart_from_attempts_that_were_given_back_or_died(ledger: Ledger) -> None:
    row = job()
    for number, how in enumerate([{"failed": True}, {}, {"died": True}, {"failed": True}], start=1):
        assert row.id in ledger.begin([attempt(row, attempt=number)])
        ledger.end_attempts("w1", [row.id], **how)
    seen = ledger.lookup([row], "w2")[row.id]
    assert (seen.attempt, seen.failures, seen.suspect) == (4, 2, 1)


def test_an_asker_that_does_not_hold_its_own_open_attempt_lost_it(ledger: Ledger) -> None:
    row = job()
    ledger.heartbeat("w1", "default", "m", ttl=60)
    ledger.begin([attempt(row, "w1")])
    seen = ledger.lookup([row], "w1")[row.id]
    assert (seen.live_elsewhere, seen.suspect) == (False, 1)
