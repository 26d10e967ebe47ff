"""What is forgotten of batches, and what forgetting costs."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from rows import job, named, outcome, query, rejection

from headrace.ledger import Ledger, LedgerUnavailable, retention
from headrace.schemas import BatchClosed, BatchOpened, uuid7

KEEP = timedelta(days=5)
SAID = "UPDATE batches SET said_at = now() - interval '9 days'"
REJECTED = "UPDATE rejections SET rejected_at = now() - interval '9 days'"
ENDED = (
    "UPDATE jobs_named SET submitted_at = now() - interval '9 days', finished_at = now() - interval '9 days'"
)


def change(database_url: str, *statements: str) -> None:
    with psycopg.connect(database_url) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type]


def fill(ledger: Ledger) -> None:
    """A batch of a job of an old day, a named one and a rejected record, which have all ended."""
    old = uuid7(int((datetime.now(UTC) - timedelta(days=10)).timestamp() * 1000))
    ledger.finish([outcome(job(id=old)), outcome(named("n"))])
    ledger.reject([rejection()])


@pytest.mark.parametrize("closed", [True, False])
def test_a_batch_is_forgotten_with_the_last_of_its_jobs(
    ledger: Ledger, database_url: str, closed: bool
) -> None:
    fill(ledger)
    if closed:
        ledger.apply_control([BatchClosed(tenant="acme", batch_id="b1", expected=3)])
    change(database_url, SAID, REJECTED, ENDED)
    ledger.retire(KEEP)
    assert ledger.batch("acme", "b1") is None
    assert query(database_url, "SELECT count(*) FROM batch_counts") == [(0,)]


@pytest.mark.parametrize(
    "old", [(REJECTED, ENDED), (SAID, ENDED), (SAID, REJECTED)], ids=["said of", "a rejected record", "a job"]
)
def test_a_batch_is_kept_whole_while_anything_of_it_is_young(
    ledger: Ledger, database_url: str, old: tuple[str, str]
) -> None:
    fill(ledger)
    change(database_url, *old)
    before = ledger.batch("acme", "b1")
    ledger.retire(KEEP)
    assert ledger.batch("acme", "b1") == before


def test_a_batch_that_is_opened_long_before_its_jobs_come_is_kept(ledger: Ledger) -> None:
    """Its producer may give it any time of opening; what counts is when that was heard."""
    opened = datetime.now(UTC) - timedelta(days=300)
    ledger.apply_control([BatchOpened(tenant="acme", batch_id="b1", opened_at=opened)])
    ledger.retire(KEEP)
    assert ledger.batch("acme", "b1") is not None


def test_jobs_of_a_forgotten_batch_that_come_again_are_a_batch_anew(
    ledger: Ledger, database_url: str
) -> None:
    fill(ledger)
    change(database_url, SAID, REJECTED, ENDED)
    ledger.retire(KEEP)
    ledger.finish([outcome(named("n"))])
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.succeeded, batch.rejected, batch.expected) == (1, 1, 0, None)


def test_a_batch_is_not_forgotten_under_a_job_that_is_being_written(
    ledger: Ledger, database_url: str
) -> None:
    fill(ledger)
    change(database_url, SAID, REJECTED, ENDED)
    with psycopg.connect(database_url) as writer:
        # What every writer does between its jobs and its counters.
        writer.execute("INSERT INTO batches (tenant, batch_id) VALUES ('acme', 'b1') ON CONFLICT DO NOTHING")
        with pytest.raises(LedgerUnavailable):
            ledger.retire(KEEP)
    assert ledger.batch("acme", "b1") is not None
    ledger.retire(KEEP)
    assert ledger.batch("acme", "b1") is None


@pytest.mark.parametrize(("holds", "lines"), [(None, 12), ("one", 9), ("two", 9)])
def test_a_batch_is_as_near_to_its_end_when_its_rejections_have_been_forgotten(
    ledger: Ledger, database_url: str, holds: str | None, lines: int
) -> None:
    """Three rejections of each kind: of a nameless sending and of two others, in place of a job of this batch or not."""
    kinds = product(range(3), (None, "one", "two"), (False, True))
    ledger.reject([rejection(submission=sending, same_batch=same) for _, sending, same in kinds])
    reopened = rejection(submission="one", same_batch=True)
    ledger.reject([reopened])
    ledger.reopen([replace(reopened, run=2)])
    ledger.apply_control([BatchClosed(tenant="acme", batch_id="b1", expected=99, submission=holds)])
    assert lines_ended(database_url) == lines
    for some in (" WHERE src_offset % 2 = 0", ""):
        change(database_url, REJECTED + some)
        ledger.retire(KEEP)
        assert lines_ended(database_url) == lines
    assert query(database_url, "SELECT count(*) FROM rejections") == [(0,)]
    assert query(database_url, "SELECT sum(rejected) FROM batch_counts") == [(lines,)]


def lines_ended(database_url: str) -> int:
    """The largest count with which the one batch would be complete."""
    with psycopg.connect(database_url) as connection:
        for expected in range(99):
            connection.execute("UPDATE batches SET expected = %s", (expected,))
            if connection.execute("SELECT state FROM batch_progress").fetchall() != [("complete",)]:
                connection.rollback()
                return expected - 1
    raise AssertionError("it is complete with any count")


def test_many_batches_are_forgotten(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCHES", 3)
    closed = [BatchClosed(tenant="acme", batch_id=f"b{number}", expected=0) for number in range(8)]
    ledger.apply_control(closed)
    change(database_url, SAID + " WHERE batch_id <> 'b7'")
    ledger.retire(KEEP)
    assert query(database_url, "SELECT batch_id FROM batches") == [("b7",)]


def test_a_batch_that_is_announced_again_is_kept_for_the_jobs_that_follow(
    ledger: Ledger, database_url: str
) -> None:
    said = [
        BatchOpened(tenant="acme", batch_id="again"),
        BatchClosed(tenant="acme", batch_id="again", expected=2),
        BatchClosed(tenant="acme", batch_id="never again", expected=2),
    ]
    ledger.apply_control(said)
    change(database_url, SAID)
    ledger.apply_control(said[:2])
    ledger.retire(KEEP)
    assert query(database_url, "SELECT batch_id, expected FROM batches") == [("again", 2)]


# 40,000 named jobs, one an hour, ten a batch.
MANY = """
INSERT INTO jobs (id, tenant, batch_id, pool, tier, content_sha, src_topic, src_partition, src_offset, state, run, attempt,
    submitted_at, finished_at)
SELECT id, 'acme', 'b' || n / 10, 'default', 'standard', '', 't', 0, n, 2, 1, 1, came, came
FROM (SELECT n, ('ff' || right(md5(n::text), 30))::uuid AS id, now() - n * interval '1 hour' AS came
      FROM generate_series(1, 40000) n) made;
INSERT INTO results (id, run, body) SELECT id, 1, '{}' FROM jobs;
INSERT INTO attempts (id, run, attempt, worker, group_size) SELECT id, 1, 1, 'w', 0 FROM jobs;
INSERT INTO batches (tenant, batch_id, said_at) SELECT tenant, batch_id, max(submitted_at) FROM jobs GROUP BY 1, 2;
INSERT INTO batch_counts (tenant, batch_id, shard, submitted, succeeded) SELECT tenant, batch_id, 0, 10, 10 FROM batches;
ANALYZE;
"""


def test_forgetting_reads_nothing_that_is_young(ledger: Ledger, database_url: str) -> None:
    change(database_url, MANY)
    keep = timedelta(hours=39_000, minutes=30)

    def plan(statement: str, **values: Any) -> Callable[[Any], str]:
        def explain(cursor: Any) -> str:
            return "\n".join(
                line for (line,) in cursor.execute(f"EXPLAIN {statement}", {"keep": keep, **values})
            )

        return explain

    batch = {"tenants": ["acme"], "batch_ids": ["b3999"]}
    plans = [
        plan(retention._FORGET_NAMED, chunk=retention.CHUNK),
        plan(retention._BARE_BATCHES),
        plan(retention._FORGET_BATCHES, **batch),
    ]
    for text in map(ledger._database.transaction, plans):
        assert re.findall(r"Seq Scan on (?:\w+_named|batches|batch_counts)\b", text) == [], text
    ledger.retire(keep)
    for table in ("jobs", "results", "attempts"):
        assert query(database_url, f"SELECT count(*) FROM {table}") == [(39_000,)]
    ((batches,),) = query(database_url, "SELECT count(*) FROM batches")
    assert batches == 3_901
