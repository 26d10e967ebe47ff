"""Batches, from their opening to their completion, and the views that show them."""

from datetime import UTC, datetime, timedelta
from itertools import permutations

import psycopg
import pytest
from rows import attempt, job, jobs, outcome, rejection

from headrace.ledger import BatchState, Ledger
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, JobState, uuid7

OPENED = BatchOpened(tenant="acme", batch_id="b1", input_ref="s3://in", metadata={"team": "search"})
CLOSED = BatchClosed(tenant="acme", batch_id="b1", expected=3)


def batch_state(ledger: Ledger) -> BatchState:
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    return batch.state


def test_an_unknown_batch_is_none(ledger: Ledger) -> None:
    assert ledger.batch("acme", "b1") is None


def test_a_batch_is_complete_when_closed_and_all_it_expects_has_ended(ledger: Ledger) -> None:
    one, two = jobs(2)
    ledger.apply_control([OPENED])
    ledger.record([one, two], [rejection()])
    assert batch_state(ledger) is BatchState.OPEN
    ledger.finish([outcome(one)])
    ledger.apply_control([CLOSED])
    assert batch_state(ledger) is BatchState.CLOSED
    ledger.finish([outcome(two, JobState.FAILED)])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.complete
    assert batch.done == 3


def test_a_batch_that_was_never_closed_is_not_complete(ledger: Ledger) -> None:
    ledger.apply_control([OPENED])
    ledger.finish([outcome(row) for row in jobs(3)])
    assert batch_state(ledger) is BatchState.OPEN


def test_an_empty_batch_is_complete_once_closed(ledger: Ledger) -> None:
    ledger.apply_control([BatchClosed(tenant="acme", batch_id="b1", expected=0)])
    assert batch_state(ledger) is BatchState.COMPLETE


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_messages_and_jobs_may_come_in_any_order(ledger: Ledger, order: tuple[int, ...]) -> None:
    rows = jobs(3)
    steps = [
        lambda: ledger.apply_control([OPENED]),
        lambda: ledger.apply_control([CLOSED]),
        lambda: ledger.finish([outcome(row) for row in rows]),
    ]
    for step in order:
        steps[step]()
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.state is BatchState.COMPLETE
    assert (batch.expected, batch.succeeded) == (3, 3)
    assert batch.opened_at is not None


def test_repeated_messages_change_nothing(ledger: Ledger) -> None:
    ledger.apply_control([OPENED, CLOSED])
    before = ledger.batch("acme", "b1")
    other = BatchClosed(tenant="acme", batch_id="b1", expected=2, closed_at=datetime.now(UTC))
    ledger.apply_control([OPENED, CLOSED, OPENED, other])
    assert ledger.batch("acme", "b1") == before


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("together", [True, False])
def test_of_several_counts_the_largest_holds_in_any_order(
    ledger: Ledger, order: tuple[int, ...], together: bool
) -> None:
    counts = [BatchClosed(tenant="acme", batch_id="b1", expected=expected) for expected in (1, 3, 2)]
    said = [counts[number] for number in order]
    for messages in [said] if together else [[message] for message in said]:
        ledger.apply_control(messages)
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.expected == 3


def test_a_batch_that_grew_is_complete_when_all_of_it_has_ended(ledger: Ledger) -> None:
    first, *more = jobs(4)
    ledger.finish([outcome(first)])
    ledger.apply_control([BatchClosed(tenant="acme", batch_id="b1", expected=1)])
    assert batch_state(ledger) is BatchState.COMPLETE
    ledger.record(more)  # before the word that there are more
    assert batch_state(ledger) is BatchState.CLOSED
    ledger.apply_control([BatchClosed(tenant="acme", batch_id="b1", expected=4)])
    ledger.finish([outcome(row) for row in more[:2]])
    assert batch_state(ledger) is BatchState.CLOSED
    ledger.finish([outcome(more[2])])
    assert batch_state(ledger) is BatchState.COMPLETE


def test_a_batch_sent_twice_is_complete_when_both_have_ended(ledger: Ledger) -> None:
    rows = jobs(6)
    ledger.record(rows)
    ledger.apply_control([CLOSED, CLOSED])
    ledger.finish([outcome(row) for row in rows[:5]])
    assert batch_state(ledger) is BatchState.CLOSED
    ledger.finish([outcome(rows[5])])
    assert batch_state(ledger) is BatchState.COMPLETE


def test_rejected_records_do_not_stand_for_jobs_that_are_left(ledger: Ledger) -> None:
    rows = jobs(3)
    ledger.record(rows)
    ledger.apply_control([CLOSED])
    # The file has changed and is sent again under its idempotency key: each line has the id of another job.
    ledger.record([], [rejection() for _ in rows])
    assert batch_state(ledger) is BatchState.CLOSED
    ledger.finish([outcome(row) for row in rows])
    assert batch_state(ledger) is BatchState.COMPLETE


def closed(submission: str, expected: int = 3) -> BatchClosed:
    return BatchClosed(tenant="acme", batch_id="b1", expected=expected, submission=submission)


def test_a_line_that_was_rejected_in_each_sending_of_its_batch_stands_once(ledger: Ledger) -> None:
    rows = jobs(2)
    ledger.record(rows, [rejection(submission="one")])
    ledger.apply_control([closed("one")])
    again = rejection(submission="two")
    ledger.record(rows, [again])
    ledger.apply_control([closed("two")])
    ledger.finish([outcome(row) for row in rows])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.state, batch.rejected, batch.done) == (BatchState.COMPLETE, 1, 3)
    assert [row.src_offset for row in ledger.rejections("acme", "b1")] == [again.src_offset]


def test_a_sending_takes_over_from_an_equal_one_without_a_name_and_not_the_other_way_round(
    ledger: Ledger,
) -> None:
    rows = jobs(2)
    ledger.record(rows)
    ledger.apply_control([CLOSED])  # as before sendings had names, or by another producer
    for name in ("one", "two"):
        ledger.record([], [rejection(submission=name)])
        ledger.apply_control([closed(name)])
    ledger.apply_control([CLOSED])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.expected, batch.rejected) == (3, 1)
    assert [row.submission for row in ledger.rejections("acme", "b1")] == ["two"]


@pytest.mark.parametrize("turned", [False, True])
def test_of_equal_counts_the_latest_sending_holds_and_of_others_the_largest(
    ledger: Ledger, turned: bool
) -> None:
    kept = rejection(submission="large, again")
    ledger.record([], [rejection(submission="large"), rejection(submission="small"), kept])
    messages = [closed("large", 1), closed("large, again", 1), closed("small", 0)]
    if turned:
        for message in messages:
            ledger.apply_control([message])
    else:
        ledger.apply_control(messages)
    assert [row.submission for row in ledger.rejections("acme", "b1")] == ["large, again"]


def test_a_mended_line_stands_for_what_was_rejected_of_it(ledger: Ledger) -> None:
    rows = jobs(3)
    ledger.record(rows[:2], [rejection(submission="one")])
    ledger.apply_control([closed("one"), closed("two")])
    ledger.finish([outcome(row) for row in rows[:2]])
    assert batch_state(ledger) is BatchState.CLOSED  # the mended line has not been recorded yet
    ledger.record(rows)
    ledger.finish([outcome(rows[2])])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.state, batch.rejected, batch.done) == (BatchState.COMPLETE, 0, 3)


def test_changed_lines_end_with_the_jobs_that_are_there(ledger: Ledger) -> None:
    rows = jobs(4)
    ledger.record(rows[:2])
    ledger.finish([outcome(row) for row in rows[:2]])
    ledger.record([job("changed", id=row.id, submission="two") for row in rows[:2]])
    ledger.apply_control([closed("two", 4)])
    assert batch_state(ledger) is BatchState.CLOSED  # two of its lines have not been recorded yet
    ledger.record(rows[2:])
    ledger.finish([outcome(row) for row in rows[2:]])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.state, batch.rejected) == (BatchState.COMPLETE, 2)


def test_a_batch_whose_lines_are_all_jobs_of_another_one_is_complete(ledger: Ledger) -> None:
    rows = jobs(3, batch_id="b0")
    ledger.record(rows)
    ledger.record([job("its batch is content too", id=row.id, submission="one") for row in rows])
    ledger.apply_control([closed("one")])
    assert batch_state(ledger) is BatchState.COMPLETE


def test_a_batch_that_was_cancelled_and_never_closed_is_cancelled_once_all_that_came_has_ended(
    ledger: Ledger,
) -> None:
    rows = jobs(2)
    ledger.record(rows[:1])
    ledger.apply_control([CancelBatch(tenant="acme", batch_id="b1")])
    assert batch_state(ledger) is BatchState.CANCELLING
    ledger.finish([outcome(rows[0], JobState.CANCELLED, attempt=0)])
    assert batch_state(ledger) is BatchState.CANCELLED
    ledger.record(rows)  # what was on its way
    assert batch_state(ledger) is BatchState.CANCELLING
    ledger.finish([outcome(rows[1], JobState.CANCELLED, attempt=0)])
    assert batch_state(ledger) is BatchState.CANCELLED


def test_a_cancelled_batch_shows_until_its_jobs_have_ended(ledger: Ledger) -> None:
    rows = jobs(3)
    ledger.record(rows)
    ledger.apply_control([CLOSED, CancelBatch(tenant="acme", batch_id="b1")])
    assert batch_state(ledger) is BatchState.CANCELLING
    ledger.finish([outcome(row, JobState.CANCELLED, attempt=0) for row in rows])
    assert batch_state(ledger) is BatchState.COMPLETE


def test_results_are_read_in_pages_in_id_order(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.ledger.queries.PAGE", 3)
    rows = jobs(10)
    ledger.finish([outcome(row) for row in rows[:8]])
    ledger.record(rows[8:])
    ended = sorted(row.id for row in rows[:8])
    assert [result.id for result in ledger.results("acme", "b1")] == ended
    assert [result.id for result in ledger.results("acme", "b1", after=ended[4])] == ended[5:]
    assert list(ledger.results("acme", "b2")) == []


def test_the_backlog_of_each_tier_is_told_with_its_oldest_minute(ledger: Ledger) -> None:
    now = datetime.now(UTC).replace(second=30, microsecond=0)
    old = job(submitted_at=now - timedelta(minutes=5))
    running = job(submitted_at=now - timedelta(minutes=9))
    ledger.record([old, running, job(submitted_at=now), job(tier="bulk", submitted_at=now)])
    ledger.begin([attempt(running)])
    bulk, standard = ledger.backlog()
    assert (bulk.tier, bulk.queued, bulk.running) == ("bulk", 1, 0)
    assert (standard.tier, standard.queued, standard.running) == ("standard", 2, 1)
    assert standard.oldest == (now - timedelta(minutes=5)).replace(second=0)
    ledger.finish([outcome(old), outcome(running)])
    assert ledger.backlog()[1].oldest == now.replace(second=0)


def test_draining_forgets_minutes_that_are_over_and_nothing_else(ledger: Ledger) -> None:
    hours = timedelta(hours=2)
    over = [job(submitted_at=datetime.now(UTC) - hours, tier="bulk") for _ in range(3)]
    waits = job(submitted_at=datetime.now(UTC) - hours)
    ledger.record([waits])
    ledger.finish([outcome(row) for row in over])
    assert len(ledger.backlog()) == 2
    ledger.drain()
    (left,) = ledger.backlog()
    assert (left.tier, left.queued) == ("standard", 1)


def test_an_unknown_job_is_none(ledger: Ledger) -> None:
    assert ledger.job(uuid7()) is None
    assert ledger.result(uuid7()) is None


# Ten batches of a thousand rejected records each, of which every second sending has a name.
MANY_REJECTED = """
INSERT INTO rejections (src_topic, src_partition, src_offset, tenant, batch_id, code, message, submission)
SELECT 't', 0, n, 'acme', 'b' || n % 10, 'invalid_json', repeat('x', 100), CASE WHEN n % 2 = 0 THEN 's' END
FROM generate_series(1, 10000) n;
INSERT INTO batches (tenant, batch_id, submission) SELECT DISTINCT tenant, batch_id, submission FROM rejections;
INSERT INTO batch_counts (tenant, batch_id, shard, rejected) SELECT tenant, batch_id, 0, 1000 FROM batches
"""


@pytest.mark.parametrize("batch_id", ["b1", "b2"])
def test_looking_at_a_batch_of_many_bad_lines_reads_an_index_and_no_rows(
    database_url: str, batch_id: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(MANY_REJECTED)
        connection.execute("VACUUM ANALYZE rejections")
        question = f"SELECT * FROM batch_progress WHERE tenant = 'acme' AND batch_id = '{batch_id}'"
        lines = connection.execute(f"EXPLAIN (ANALYZE, TIMING OFF) {question}")  # type: ignore[arg-type]
        plan = "\n".join(line for (line,) in lines)
    assert "Index Only Scan using rejections_tenant_batch_id_submission_idx" in plan, plan
    assert "Heap Fetches: 0" in plan, plan
