"""Day partitions: which id belongs where, made ahead, dropped when their time is over."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import attempt, job, named, outcome, query, rejection
from waiting import eventually

from headrace.ledger import (
    Ledger,
    LedgerUnavailable,
    RowRefused,
    attempts,
    database,
    finish,
    lookup,
    partitions,
    record,
    reopen,
    retention,
)
from headrace.ledger.partitions import AHEAD, day_of, first_id, span, today, within
from headrace.schemas import CancelBatch, named_key, uuid7


@given(st.integers(0, (1 << 48) - 1), st.binary(min_size=10, max_size=10))
def test_an_id_lies_in_the_range_of_its_day(milliseconds: int, entropy: bytes) -> None:
    id = uuid7(milliseconds, entropy)
    day = day_of(id)
    if id.bytes[0] == 0xFF:
        assert day is None
    elif milliseconds // 86_400_000 + date(1970, 1, 1).toordinal() >= date.max.toordinal():
        assert day == date.max
    else:
        assert day is not None
        assert first_id(day) <= id < first_id(day + timedelta(days=1))


@given(st.text())
def test_named_ids_have_no_day(name: str) -> None:
    assert day_of(named_key("acme", name)) is None


@given(st.lists(st.builds(UUID, int=st.integers(0, (1 << 128) - 1)), min_size=1))
def test_the_span_of_ids_holds_them_all(ids: list[UUID]) -> None:
    days = span(ids)
    assert all(days["first"] <= id <= days["last"] for id in ids)


def test_a_statement_about_todays_jobs_looks_into_no_other_day(ledger: Ledger, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        plan = connection.execute(f"EXPLAIN SELECT FROM jobs WHERE {within('jobs')}", span([uuid7()]))
        text = "".join(line for (line,) in plan)
    assert set(re.findall(r"jobs_(?:\d{8}|named)\b", text)) == {f"jobs_{today():%Y%m%d}"}


class Explained:
    """A cursor that notes which partitions the statements go through."""

    def __init__(self, cursor: Any) -> None:
        self._cursor, self.partitions = cursor, dict[str, set[str]]()

    def execute(self, statement: str, *args: Any, **kwargs: Any) -> Any:
        if not statement.lstrip().startswith("CREATE"):
            plan = self._cursor.connection.execute(f"EXPLAIN {statement}", *args)
            text = "".join(line for (line,) in plan)
            self.partitions[statement] = set(re.findall(r"(?:jobs|results|attempts)_(\d{8}|named)\b", text))
        return self._cursor.execute(statement, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def test_no_statement_of_the_recorder_or_a_worker_looks_into_other_days(ledger: Ledger) -> None:
    row = job()
    other = replace(row, content_sha=b"other", src_offset=row.src_offset + 1)
    steps: list[Callable[[Any], object]] = [
        lambda cursor: record.record(cursor, [row]),
        lambda cursor: record.record(cursor, [other]),
        lambda cursor: lookup.lookup(cursor, [row], "w1"),
        lambda cursor: attempts.begin(cursor, [attempt(row)]),
        lambda cursor: attempts.begin_absent(cursor, [attempt(row)]),
        lambda cursor: attempts.end(cursor, "w1", [row.id], False, False),
        lambda cursor: finish.finish(cursor, [outcome(row)]),
        lambda cursor: finish.finish_absent(cursor, [outcome(row)]),
        lambda cursor: reopen.reopen(cursor, [replace(row, run=2)]),
    ]
    for step in steps:

        def explained(cursor: Any, step: Callable[[Any], object] = step) -> dict[str, set[str]]:
            watched = Explained(cursor)
            step(watched)
            return watched.partitions

        for statement, days in ledger._database.transaction(explained).items():
            assert days <= {f"{day_of(row.id):%Y%m%d}"}, statement


def test_partitions_are_made_ahead_and_only_once(ledger: Ledger, database_url: str) -> None:
    assert ledger.ensure_partitions() == 0
    assert ledger.ensure_partitions(days_ahead=AHEAD + 2) == 2
    for table in ("jobs", "results", "attempts"):
        names = query(
            database_url,
            f"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = '{table}'::regclass",
        )
        days = {today() + timedelta(days=n) for n in range(-1, AHEAD + 3)}
        assert {name for (name,) in names} == {f"{table}_named"} | {f"{table}_{day:%Y%m%d}" for day in days}


def test_partitions_of_jobs_leave_half_a_page_for_updates(ledger: Ledger, database_url: str) -> None:
    ledger.ensure_partitions(days_ahead=AHEAD + 1)
    options = query(
        database_url,
        "SELECT DISTINCT reloptions FROM pg_class WHERE relkind = 'r' AND relname ~ '^(jobs|attempts)_'",
    )
    assert options == [(["fillfactor=50"],)]


def test_updates_stay_heap_only(ledger: Ledger, database_url: str) -> None:
    rows = [job() for _ in range(300)]
    for part in range(0, 300, 50):
        ledger.record(rows[part : part + 50])
        ledger.begin([attempt(row) for row in rows[part : part + 50]])
        ledger.finish([outcome(row) for row in rows[part : part + 50]])
    name = f"jobs_{today():%Y%m%d}"
    with psycopg.connect(database_url) as connection:
        (rewritten,) = connection.execute(
            "SELECT count(*) FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid"
            " AND a.attnum = ANY(i.indkey) WHERE i.indrelid = %s::regclass"
            " AND a.attname IN ('state', 'run', 'attempt', 'finished_at', 'error_code')",
            (name,),
        ).fetchone() or (None,)
    assert rewritten == 0  # no index holds what an update changes


def test_a_day_within_reach_is_made_when_it_is_met(ledger: Ledger) -> None:
    week = uuid7(int((datetime.now(UTC) - timedelta(days=20)).timestamp() * 1000))
    assert ledger.record([job(id=week)]) == 1
    year = uuid7(int((datetime.now(UTC) - timedelta(days=365)).timestamp() * 1000))
    assert not ledger.keeps(year)


def test_a_day_that_another_process_made_is_found(ledger: Ledger, database_url: str) -> None:
    soon = uuid7(int((datetime.now(UTC) + timedelta(days=AHEAD)).timestamp() * 1000))
    later = uuid7(int((datetime.now(UTC) + timedelta(days=AHEAD + 1)).timestamp() * 1000))
    assert ledger.keeps(soon)
    with Ledger(database_url) as other:
        other.ensure_partitions(days_ahead=AHEAD + 1)
        assert other.keeps(later)
        assert other.record([job(id=later)]) == 1


@pytest.fixture
def old_id(ledger: Ledger) -> UUID:
    return uuid7(int((datetime.now(UTC) - timedelta(days=10)).timestamp() * 1000))


def test_days_that_ended_long_ago_are_dropped(ledger: Ledger, old_id: UUID) -> None:
    row, young = job(id=old_id), job()
    ledger.finish([outcome(row), outcome(young)])
    day = day_of(old_id)
    assert ledger.retire(timedelta(days=30)) == []
    assert ledger.retire(timedelta(days=5)) == [f"{day:%Y%m%d}"]
    assert ledger.job(row.id) is None
    assert ledger.job(young.id) is not None


def test_a_day_with_a_live_job_is_kept(ledger: Ledger, old_id: UUID) -> None:
    row = job(id=old_id)
    ledger.record([row])
    assert ledger.retire(timedelta(days=5)) == []
    ledger.finish([outcome(row)])
    assert len(ledger.retire(timedelta(days=5))) == 1


def test_named_jobs_are_forgotten_by_their_age(ledger: Ledger, database_url: str) -> None:
    over, young, live = named("over"), named("young"), named("live")
    ledger.begin([attempt(over)])
    ledger.finish([outcome(over), outcome(young)])
    ledger.record([live])
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE jobs SET submitted_at = now() - interval '9 days', finished_at = now() - interval '8 days' WHERE id = %s",
            (over.id,),
        )
    ledger.retire(timedelta(days=5))
    assert [id for (id,) in query(database_url, "SELECT id FROM jobs ORDER BY id")] == [
        row.id for row in sorted([young, live], key=lambda row: row.id)
    ]
    assert query(database_url, "SELECT count(*) FROM results") == [(1,)]
    assert query(database_url, "SELECT count(*) FROM attempts") == [(0,)]


def test_what_else_is_old_is_forgotten(ledger: Ledger, database_url: str) -> None:
    ledger.apply_control([CancelBatch(tenant="acme", batch_id="b9")])
    ledger.reject([rejection()])
    ledger.heartbeat("w1", "default", "m", ttl=1)
    ledger.retire(timedelta(days=1))
    counts = "SELECT (SELECT count(*) FROM cancels), (SELECT count(*) FROM rejections), (SELECT count(*) FROM workers)"
    assert query(database_url, counts) == [(1, 1, 1)]
    ledger.leave("w1")
    ledger.retire(timedelta(0))
    assert query(database_url, counts) == [(0, 0, 0)]


def test_while_a_day_is_looked_through_nobody_else_waits(
    ledger: Ledger, old_id: UUID, database_url: str
) -> None:
    ledger.finish([outcome(job(id=old_id))])
    day = day_of(old_id)
    assert day is not None
    # The one session that waits for a lock, and how many locks it holds that keep everybody from the table.
    waiting = """
        SELECT count(*) FILTER (WHERE granted AND mode = 'AccessExclusiveLock' AND relation = 'jobs'::regclass)
        FROM pg_locks JOIN pg_database ON pg_database.oid = database
        WHERE datname = current_database() AND pid IN (SELECT pid FROM pg_locks WHERE NOT granted)
        HAVING count(*) > 0
    """
    with psycopg.connect(database_url) as connection, ThreadPoolExecutor(1) as recorder:
        connection.execute(f"LOCK TABLE jobs_{day:%Y%m%d}")  # type: ignore[arg-type]
        dropped = recorder.submit(ledger._database.transaction, partitions.drop, day)
        held = eventually(lambda: query(database_url, waiting))
        connection.commit()
        assert dropped.result(120)
    assert held == [(0,)]


def test_a_day_that_is_being_read_is_not_dropped_and_nobody_waits_for_that_twice(
    ledger: Ledger, old_id: UUID, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, tries = job(id=old_id), []
    ledger.finish([outcome(row)])
    drop = partitions.drop

    def counted(cursor: Any, day: date) -> bool:
        tries.append(day)
        return drop(cursor, day)

    monkeypatch.setattr(partitions, "drop", counted)
    with psycopg.connect(database_url) as analyst:
        analyst.execute("SELECT count(*) FROM job_status")
        with pytest.raises(LedgerUnavailable):
            ledger.retire(timedelta(days=5))
    assert len(tries) == 1
    assert len(ledger.retire(timedelta(days=5))) == 1


def test_of_two_recorders_that_drop_a_day_one_does(ledger: Ledger, old_id: UUID) -> None:
    ledger.finish([outcome(job(id=old_id))])
    day = day_of(old_id)
    assert day is not None
    drop = ledger._database.transaction
    assert [drop(partitions.drop, day), drop(partitions.drop, day)] == [True, False]


def test_a_day_that_another_recorder_is_reading_is_left_to_it(
    ledger: Ledger, old_id: UUID, database_url: str
) -> None:
    ledger.finish([outcome(job(id=old_id))])
    with psycopg.connect(database_url) as other:
        other.execute("SELECT pg_advisory_xact_lock(1885434485)")
        assert ledger.retire(timedelta(days=5)) == []
    assert len(ledger.retire(timedelta(days=5))) == 1


def test_a_day_may_be_read_through_for_longer_than_workers_may_hold_a_transaction(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BEGIN", "BEGIN_17"):  # with the same timeouts, but shorter
        shorter = getattr(database, name).replace("= '60s'", "= '2s'")
        assert shorter != getattr(database, name)
        monkeypatch.setattr(database, name, shorter)
    read: list[date] = []

    def retirable(cursor: Any, before: date) -> list[date]:
        cursor.execute("SELECT pg_sleep(3)")
        read.append(before)
        return []

    monkeypatch.setattr(partitions, "retirable", retirable)
    ledger.retire(timedelta(days=5))
    assert len(read) == 1


@pytest.mark.parametrize(
    "failing", ["_retirable", "_forget_named", "_forget_rejections", "_forget_rest", "_bare_batches"]
)
def test_what_cannot_be_forgotten_keeps_nothing_else(
    ledger: Ledger, old_id: UUID, database_url: str, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(cursor: Any, *rest: Any) -> Any:
        raise psycopg.errors.CheckViolation

    ledger.finish([outcome(job(id=old_id)), outcome(named("over"))])
    ledger.reject([rejection()])
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE jobs SET submitted_at = now() - interval '9 days', finished_at = now() - interval '9 days'"
        )
        connection.execute("UPDATE rejections SET rejected_at = now() - interval '9 days'")
    monkeypatch.setattr(retention, failing, fail)
    with pytest.raises(RowRefused):
        ledger.retire(timedelta(days=5))
    left = """
        SELECT to_regclass(%s) IS NOT NULL, (SELECT count(*) FROM jobs_named) > 0, (SELECT count(*) FROM rejections) > 0
    """
    with psycopg.connect(database_url) as connection:
        kept = connection.execute(left, (f"jobs_{day_of(old_id):%Y%m%d}",)).fetchone()
    assert kept == tuple(step == failing for step in ("_retirable", "_forget_named", "_forget_rejections"))


def test_counters_that_cannot_be_locked_are_not_tried_again_at_once(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def drain(cursor: Any) -> None:
        tries.append(cursor)
        retention.drain(cursor)

    monkeypatch.setattr("headrace.ledger.ledger.drain", drain)
    with psycopg.connect(database_url) as writer:
        writer.execute("LOCK TABLE tier_counts IN ROW EXCLUSIVE MODE")
        with pytest.raises(LedgerUnavailable):
            ledger.drain()
    assert len(tries) == 1
    ledger.drain()
