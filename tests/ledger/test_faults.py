"""Postgres going away, and writers in each other's way."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import postgres
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from rows import attempt, job, jobs, outcome, query

from headrace.ledger import Ledger, LedgerUnavailable, check, database
from headrace.schemas import JobState

CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headrace'"


@pytest.fixture
def own_server() -> Iterator[postgres.Server]:
    """A server that the test may stop."""
    if not (server := postgres.server()).command:
        pytest.skip("the server named by HEADRACE_TEST_DATABASE_URL is not ours to stop")
    yield server
    server.stop()


def test_connections_cut_while_idle_are_replaced(ledger: Ledger, database_url: str) -> None:
    ledger.record(jobs(3))
    query(database_url, CUT)
    assert ledger.record(jobs(3)) == 3


def test_a_connection_cut_in_mid_transaction_repeats_it_whole(ledger: Ledger, database_url: str) -> None:
    rows, tries = jobs(3), []

    def work(cursor: database.Rows) -> int:
        from headrace.ledger.record import record

        tries.append(1)
        new = record(cursor, rows)
        if len(tries) == 1:
            query(database_url, CUT)
        return new

    assert ledger._database.transaction(work) == 3
    assert len(tries) == 2
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.submitted == 3


def test_a_commit_whose_answer_was_lost_counts_once(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, lost = jobs(3), []
    real = database.Database._try

    def once(self: database.Database, work: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, work, *args, **kwargs)
        if not lost:
            lost.append(1)
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return result

    ledger.keeps(rows[0].id)
    for call, expected in [
        (lambda: ledger.record(rows), 0),
        (lambda: ledger.begin([attempt(row) for row in rows]).started, {row.id for row in rows}),
        (lambda: set(ledger.finish([outcome(row) for row in rows]).winners), {row.id for row in rows}),
    ]:
        lost.clear()
        monkeypatch.setattr(database.Database, "_try", once)
        assert call() == expected
        monkeypatch.setattr(database.Database, "_try", real)
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.submitted, batch.succeeded, batch.running, batch.queued) == (3, 3, 0, 0)


def test_a_restart_is_waited_out(own_server: postgres.Server) -> None:
    with postgres.clone(own_server) as url, Ledger(url, retry_for=240) as ledger:
        ledger.record(jobs(3))
        own_server.halt(signal.SIGQUIT)
        again = threading.Timer(0.5, own_server.start)
        again.start()
        assert ledger.record(jobs(3)) == 3
        again.join()
        batch = ledger.batch("acme", "b1")
        assert batch is not None
        assert batch.submitted == 6


def test_an_absence_without_end_is_told_after_the_time_given() -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    with Ledger(nowhere, retry_for=0.2) as ledger, pytest.raises(LedgerUnavailable):
        ledger.backlog()


def test_a_pool_in_use_is_waited_for_and_then_told(database_url: str) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold(cursor: database.Rows) -> None:
        held.set()
        let_go.wait(120)

    with Ledger(database_url, pool_size=1, retry_for=0.5) as ledger:
        thread = threading.Thread(target=ledger._database.transaction, args=(hold,))
        thread.start()
        assert held.wait(120)
        with pytest.raises(LedgerUnavailable, match="pool"):
            ledger.backlog()
        let_go.set()
        thread.join()
        assert ledger.backlog() == []


def test_a_read_only_database_is_unavailable_not_a_refusal(database_url: str) -> None:
    name = query(database_url, "SELECT current_database()")[0][0]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")  # type: ignore[arg-type]
    with Ledger(database_url, retry_for=0.1) as ledger, pytest.raises(LedgerUnavailable, match="25006"):
        ledger.record(jobs(1))


def test_writers_in_opposite_orders_do_not_deadlock(database_url: str) -> None:
    rows = jobs(200)
    with Ledger(database_url, pool_size=8) as ledger:
        ledger.keeps(rows[0].id)

        def write(number: int) -> int:
            mine = rows if number % 2 else rows[::-1]
            ledger.record(mine)
            ledger.begin([attempt(row, f"w{number}") for row in mine])
            return len(ledger.finish([outcome(row) for row in mine]).changed)

        with ThreadPoolExecutor(6) as pool:
            assert sum(pool.map(write, range(6))) == 200
        batch = ledger.batch("acme", "b1")
        assert batch is not None
        assert (batch.submitted, batch.succeeded, batch.queued, batch.running) == (200, 200, 0, 0)
        assert [(tier.queued, tier.running) for tier in ledger.backlog()] == [(0, 0)]
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert query(database_url, deadlocks) == [(0,)]


def test_of_many_that_finish_the_same_jobs_one_wins_each(database_url: str) -> None:
    rows = jobs(100)
    ends = [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED]
    with Ledger(database_url, pool_size=4) as ledger:
        ledger.record(rows[::2])
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda end: ledger.finish([outcome(row, end) for row in rows]), ends))
        assert sorted(id for each in done for id in each.changed) == sorted(row.id for row in rows)
        for each in done:
            assert each.changed | set(each.winners) == {row.id for row in rows}
        stored = dict(query(database_url, "SELECT state, count(*) FROM job_status GROUP BY state"))
        batch = ledger.batch("acme", "b1")
        assert batch is not None
        assert {end.value: getattr(batch, end) for end in ends if getattr(batch, end)} == stored
        assert batch.submitted == 100


def test_a_stopped_process_does_not_hold_its_rows_for_ever(database_url: str) -> None:
    row = job()
    with Ledger(database_url) as ledger:
        ledger.record([row])
        settings = ledger._database.transaction(
            lambda cursor: cursor.execute(
                "SELECT name, setting::int FROM pg_settings WHERE name IN"
                " ('lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')"
            ).fetchall()
        )
    (version,) = query(database_url, "SELECT current_setting('server_version_num')::int")[0]
    assert len(settings) == (4 if version >= 170_000 else 3)
    assert all(0 < milliseconds <= 60_000 for _, milliseconds in settings)


def test_times_are_utc_whatever_the_session_thinks(ledger: Ledger, database_url: str) -> None:
    assert query(database_url, "SHOW timezone") != [("UTC",)]
    row = job()
    ledger.finish([outcome(row)])
    stored = ledger.job(row.id)
    assert stored is not None
    assert stored.finished_at is not None
    assert stored.submitted_at == row.submitted_at
    assert stored.finished_at.utcoffset() == row.submitted_at.utcoffset()
    assert abs((stored.finished_at - row.submitted_at).total_seconds()) < 600


def test_a_connection_that_the_driver_finds_gone_repeats_the_transaction(ledger: Ledger) -> None:
    tries: list[int] = []

    def work(cursor: database.Rows) -> str:
        tries.append(1)
        if len(tries) == 1:
            cursor.connection.close()
            raise psycopg.InterfaceError("the connection is lost")
        return "done"

    assert ledger._database.transaction(work) == "done"
    assert len(tries) == 2


def test_a_connection_that_is_gone_at_its_checkout_is_tried_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lost = ledger._database._engine, [psycopg.InterfaceError("the connection is lost")]
    check_out = engine.raw_connection

    def raw_connection() -> Any:
        if lost:
            raise lost.pop()
        return check_out()

    monkeypatch.setattr(engine, "raw_connection", raw_connection)
    assert ledger.backlog() == []


def test_a_mistake_on_a_sound_connection_is_neither_repeated_nor_hidden(ledger: Ledger) -> None:
    tries: list[int] = []

    def work(cursor: database.Rows) -> None:
        tries.append(1)
        cursor.close()
        cursor.execute("SELECT 1")

    with pytest.raises(psycopg.InterfaceError, match="cursor is closed"):
        ledger._database.transaction(work)
    assert len(tries) == 1


def test_transactions_are_read_committed_whatever_the_databases_default(database_url: str) -> None:
    name = query(database_url, "SELECT current_database()")[0][0]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = serializable")  # type: ignore[arg-type]
    with Ledger(database_url) as ledger:
        isolation = ledger._database.transaction(
            lambda cursor: cursor.execute("SHOW transaction_isolation").fetchone()
        )
    assert isolation == ("read committed",)


def test_of_several_hosts_the_one_that_can_be_written_is_found(database_url: str) -> None:
    named = conninfo_to_dict(database_url)
    host, port = named["host"], named.get("port") or 5432
    hosts = f"host=127.0.0.1,{host}&port=1,{port}&target_session_attrs=read-write"
    password = f":{quote(str(named['password']))}" if named.get("password") else ""
    several = f"postgresql+psycopg://{named['user']}{password}@/{named['dbname']}?{hosts}"
    assert check(several) == []
    with Ledger(several) as ledger:
        assert ledger.batch("acme", "none") is None


def test_a_server_that_vanished_is_given_up_as_soon_as_the_address_says(database_url: str) -> None:
    def keepalives(url: str) -> tuple[str, str]:
        with Ledger(url) as ledger:
            told = ledger._database.transaction(lambda cursor: cursor.connection.info.get_parameters())
        return told["keepalives_idle"], told["tcp_user_timeout"]

    assert keepalives(database_url) == ("30", "60000")
    assert keepalives(f"{database_url}?keepalives_idle=7&tcp_user_timeout=9000") == ("7", "9000")


def test_sessions_do_not_grow_old(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(ledger: Ledger) -> Any:
        return ledger._database.transaction(
            lambda cursor: cursor.execute("SELECT pg_backend_pid()").fetchone()
        )

    with Ledger(database_url) as ledger:
        assert session(ledger) == session(ledger)
    monkeypatch.setattr(database, "RECYCLE_S", 0)
    with Ledger(database_url) as ledger:
        assert session(ledger) != session(ledger)
