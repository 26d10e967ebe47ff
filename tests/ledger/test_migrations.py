"""Migrations and metadata give the same database."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import postgres
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from rows import query

from headrace import ledger
from headrace.ledger import database
from headrace.ledger.database import connect
from headrace.ledger.migrate import downgrade
from headrace.ledger.partitions import is_partition
from headrace.ledger.tables import metadata
from headrace.ledger.views import VIEWS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty_url(postgres_server: postgres.Server) -> Iterator[str]:
    """A database without our tables."""
    with postgres.empty(postgres_server) as url:
        yield url


def definitions(url: str) -> dict[str, str]:
    return {name: query(url, f"SELECT pg_get_viewdef('{name}'::regclass)")[0][0] for name in VIEWS}


def test_migrations_and_metadata_give_the_same_tables(database_url: str) -> None:
    def ours(name: str | None, kind: str, parents: Any) -> bool:
        return not (kind == "table" and name is not None and is_partition(name))

    with connect(database_url) as connection:
        options = {"include_name": ours, "compare_type": True, "compare_server_default": True}
        difference = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
    assert difference == []


def test_migrations_and_code_give_the_same_views_and_partitioning(database_url: str, empty_url: str) -> None:
    with connect(empty_url) as connection:
        metadata.create_all(connection)
        for name, definition in VIEWS.items():
            connection.exec_driver_sql(f"CREATE VIEW {name} AS {definition}")
        connection.commit()
    assert definitions(database_url) == definitions(empty_url)
    keys = (
        "SELECT partrelid::regclass::text, pg_get_partkeydef(partrelid) FROM pg_partitioned_table ORDER BY 1"
    )
    assert query(database_url, keys) == query(empty_url, keys)
    assert len(query(database_url, keys)) == 3


def test_every_migration_can_be_taken_back(empty_url: str) -> None:
    revisions = ["0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011"]
    for revision in revisions:
        ledger.migrate(empty_url, revision)
    ledger.migrate(empty_url)
    for revision in [*revisions[-2::-1], "base"]:
        downgrade(empty_url, revision)
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v')"
    assert query(empty_url, left) == [("alembic_version",)]
    ledger.migrate(empty_url)
    assert ledger.check(empty_url) == []


def test_two_deployments_may_migrate_at_once(empty_url: str) -> None:
    code = f"from headrace.ledger import migrate; migrate({empty_url!r})"
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert ledger.check(empty_url) == []


def test_check_says_what_is_missing(empty_url: str, database_url: str) -> None:
    assert ledger.check(database_url) == []
    (told,) = ledger.check(empty_url)
    assert "headrace migrate" in told
    ledger.migrate(empty_url, "0002")
    (told,) = ledger.check(empty_url)
    assert "0002" in told
    assert "0011" in told


def test_an_older_database_is_refused_and_a_newer_one_is_not(empty_url: str) -> None:
    with pytest.raises(ledger.NotMigrated, match="no Headrace tables"):
        ledger.require_migrated(empty_url)
    ledger.migrate(empty_url, "0007")
    with pytest.raises(ledger.NotMigrated, match="at migration 0007, this version needs 0011"):
        ledger.require_migrated(empty_url)
    ledger.migrate(empty_url)
    ledger.require_migrated(empty_url)
    with psycopg.connect(empty_url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    ledger.require_migrated(empty_url)  # an upgrade goes on, and this process is one of those left to restart


def test_check_asks_for_tomorrows_partition(database_url: str) -> None:
    ((name,),) = query(
        database_url,
        "SELECT to_char((now() AT TIME ZONE 'UTC')::date + 1, '\"jobs_\"YYYYMMDD')",
    )
    with psycopg.connect(database_url) as connection:
        connection.execute(f"DROP TABLE {name}")  # type: ignore[arg-type]
    (told,) = ledger.check(database_url)
    assert "no partition" in told


def test_an_unmigrated_database_is_called_so(empty_url: str) -> None:
    with ledger.Ledger(empty_url) as unready, pytest.raises(ledger.NotMigrated, match="job table is not as"):
        unready.backlog()


def test_a_migration_that_cannot_have_its_lock_gives_up_and_says_so(database_url: str) -> None:
    downgrade(database_url, "0003")
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT * FROM job_status")  # a transaction that stays open
        with pytest.raises(ledger.LedgerUnavailable, match="55P03"):
            downgrade(database_url, "0002")
    (told,) = ledger.check(database_url)
    assert "0003" in told
    downgrade(database_url, "0002")


@pytest.mark.parametrize("ask", [ledger.migrate, ledger.check])
def test_a_server_that_is_away_is_called_so(ask: Callable[[str], object]) -> None:
    with pytest.raises(ledger.LedgerUnavailable):
        ask("postgresql://nobody@127.0.0.1:1/nothing")


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(database.CONNECTION, "connect_timeout", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ledger.LedgerUnavailable, match="timeout"),
    ):
        ledger.check(f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nothing")


def test_an_address_of_another_database_is_refused_by_name() -> None:
    with pytest.raises(ledger.NotPostgres, match="mysql"):
        ledger.Ledger("mysql://me:secret@127.0.0.1:1/x")


def test_alembic_runs_from_its_own_command_line(empty_url: str) -> None:
    command = [sys.executable, "-m", "alembic", "-x", f"url={empty_url}", "upgrade", "head"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert query(empty_url, "SELECT version_num FROM alembic_version") == [("0011",)]
