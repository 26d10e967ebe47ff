"""Postgres restarts, is away, cuts connections, has none to give, has no room or will not write: what is finished waits."""

import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import postgres
import psycopg
import pytest
import small_disk
from fleet import Fleet, MakeFleet, fleet
from waiting import eventually

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

AWAY_S = 60.0
PAST_RETRIES_S = 15.0  # the ledger tries for 10 by itself; then workers and recorder are told
JOBS = 3000
DISK_MB = 128  # an empty cluster with a copy of the tables takes half of it
NO_SPACE = "No space left on device"
# Each is waited for, so that afterwards nothing of what it was about is still on its way into a table.
CUT = (
    "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity WHERE application_name = 'headrace'"
)
IN_MID_TRANSACTION = " AND state <> 'idle'"

NO_ROOM = """
CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER no_room BEFORE INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION no_room();
CREATE TRIGGER no_room BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION no_room();
"""
ROOM = "DROP FUNCTION no_room CASCADE"


@contextmanager
def fleet_on(kafka: str, server: postgres.Server) -> Iterator[Fleet]:
    with postgres.clone(server) as url, fleet(kafka, url) as made:
        yield made


def say(url: str, *statements: str) -> None:
    """As an administrator, whom nothing keeps from writing."""
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type]


@contextmanager
def in_mid_work(fleet: Fleet) -> Iterator[Fleet]:
    """What is done meanwhile is done to a fleet with most of its jobs before it, and no job may tell of it."""
    fleet.start(workers=2)
    fleet.send(JOBS)
    fleet.wait_ended(JOBS // 6)
    yield fleet
    fleet.settle()
    assert_nobody_ended_for_it(fleet)


def assert_nobody_ended_for_it(fleet: Fleet) -> None:
    """It was taken for an absence: no job was refused, none failed, none was run again."""
    fleet.assert_books_balance()
    assert fleet.count("SELECT count(*) FROM jobs WHERE error_code = 'ledger_rejected'") == 0
    assert fleet.count("SELECT count(*) FROM rejections WHERE code = 'ledger_rejected'") == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["cleanly", "as-if-the-power-had-gone"])
def test_a_database_that_restarts_again_and_again(
    kafka: str, own_postgres: postgres.Server, how: signal.Signals
) -> None:
    with fleet_on(kafka, own_postgres) as made, in_mid_work(made):
        for share in (0.2, 0.4, 0.6):
            made.wait_ended(int(share * JOBS))
            own_postgres.halt(how)
            own_postgres.start()


def test_a_database_that_is_away_for_a_minute(kafka: str, own_postgres: postgres.Server) -> None:
    with fleet_on(kafka, own_postgres) as made, in_mid_work(made), own_postgres.away():
        made.send(500)
        time.sleep(AWAY_S)


def test_connections_cut_in_mid_transaction(make_fleet: MakeFleet) -> None:
    with in_mid_work(make_fleet()) as fleet:
        cut = 0

        def cut_until_most_have_ended() -> bool:
            nonlocal cut
            cut += fleet.count(CUT + IN_MID_TRANSACTION + " AND datname = current_database()")
            return fleet.ended() >= 0.8 * JOBS

        fleet.wait(cut_until_most_have_ended, "most jobs have ended in spite of the cuts")
        assert cut > 5


def test_a_pool_of_one_connection_for_everything_a_worker_does(make_fleet: MakeFleet) -> None:
    with in_mid_work(make_fleet(ledger={"pool_size": 1, "retry_for": 1.0})):
        pass  # it is too small from the first job to the last


def test_a_server_that_has_no_connection_left(kafka: str, own_postgres: postgres.Server) -> None:
    with fleet_on(kafka, own_postgres) as made, in_mid_work(made), every_connection_taken(own_postgres.url):
        time.sleep(PAST_RETRIES_S)


@contextmanager
def every_connection_taken(url: str) -> Iterator[None]:
    """Cut Headrace's connections and take them, until it has none."""
    with contextlib.ExitStack() as others:
        administrator = others.enter_context(psycopg.connect(url, autocommit=True))
        while administrator.execute(CUT).fetchone() != (0,):
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    others.enter_context(psycopg.connect(url))
        yield


@contextmanager
def server_on(disk: small_disk.SmallDisk, place: str) -> Iterator[postgres.Server]:
    """A server with all its data or its write-ahead log on the disk. Checkpoints come when they are called."""
    folders = {place: disk.folder}
    server = postgres.server(**folders, max_connections="60", checkpoint_timeout="1h", max_wal_size="1GB")
    try:
        if not server.command:
            pytest.skip(
                "where the server named by HEADRACE_TEST_DATABASE_URL keeps its data is not ours to say"
            )
        yield server
    finally:
        server.stop()


def use_up_its_log(server: postgres.Server) -> None:
    """Ask for one segment of the write-ahead log after another: the first that finds no room ends the server.

    A checkpoint would end it too, or fail and leave it running: which file it finds no room for is chance.
    """
    a_segment = ("SELECT pg_logical_emit_message(false, 'test', '')", "SELECT pg_switch_wal()")
    with pytest.raises(psycopg.OperationalError):
        say(server.url, *a_segment * (DISK_MB // 16))


@pytest.fixture
def disk() -> Iterator[small_disk.SmallDisk]:
    with contextlib.ExitStack() as stack:
        try:
            mounted = stack.enter_context(small_disk.mounted(DISK_MB))
        except small_disk.NoMounting as error:
            pytest.skip(f"needs a small disk, and none can be mounted here: {error}")
        yield mounted


def test_a_disk_that_is_really_full(kafka: str, disk: small_disk.SmallDisk) -> None:
    with server_on(disk, "data") as server, fleet_on(kafka, server) as made, in_mid_work(made):
        disk.fill()
        made.send(JOBS // 3)
        eventually(lambda: NO_SPACE in server.log())
        time.sleep(PAST_RETRIES_S)
        assert server.is_running()
        disk.free()


@pytest.mark.parametrize("place", ["data", "wal"])
def test_a_full_disk_that_ends_the_server(kafka: str, disk: small_disk.SmallDisk, place: str) -> None:
    with server_on(disk, place) as server, fleet_on(kafka, server) as made, in_mid_work(made):
        disk.fill()
        made.send(JOBS // 3)
        if place == "data":
            eventually(lambda: NO_SPACE in server.log())
            use_up_its_log(server)
        eventually(lambda: not server.is_running())
        assert "PANIC" in server.log()
        with pytest.raises(RuntimeError, match=NO_SPACE):
            server.start()  # as a supervisor does, in vain
        disk.free()
        server.start()


def test_a_disk_said_to_be_full(make_fleet: MakeFleet) -> None:
    with in_mid_work(make_fleet()) as fleet:
        say(fleet.line.database_url, NO_ROOM)
        assert_nothing_ends_for(PAST_RETRIES_S, fleet)
        say(fleet.line.database_url, ROOM)


def test_a_database_that_only_reads(make_fleet: MakeFleet) -> None:
    with in_mid_work(make_fleet()) as fleet:
        ((name,),) = fleet.line.query("SELECT current_database()")
        say(fleet.line.database_url, f"ALTER DATABASE {name} SET default_transaction_read_only = on", CUT)
        assert_nothing_ends_for(PAST_RETRIES_S, fleet)
        say(fleet.line.database_url, f"ALTER DATABASE {name} RESET default_transaction_read_only", CUT)


def assert_nothing_ends_for(seconds: float, fleet: Fleet) -> None:
    ended = fleet.ended()
    assert ended < len(fleet.expected)
    time.sleep(seconds)
    assert fleet.ended() == ended
