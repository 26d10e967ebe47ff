"""Bring a database up to date, and say what it lacks."""

from __future__ import annotations

from datetime import timedelta

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from headrace.ledger import partitions
from headrace.ledger.database import connect
from headrace.ledger.errors import NotMigrated


def migrate(url: str, revision: str = "head") -> None:
    """Run the migrations up to `revision` and make the day partitions. Safe to run again, and from two places.

    Needs no checkout: the migrations are part of the installed package. Raises LedgerUnavailable where Postgres is
    away, or where a lock could not be had in time: run it again.
    """
    with connect(url) as connection:
        command.upgrade(_config(connection), revision)
        if revision == "head":
            ensure_partitions(connection)


def downgrade(url: str, revision: str) -> None:
    """Take migrations back down to `revision` ("base": all of them). Destroys what they made."""
    with connect(url) as connection:
        command.downgrade(_config(connection), revision)


def ensure_partitions(connection: Connection) -> None:
    """Make the day partitions from yesterday to partitions.AHEAD days from now."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    today = partitions.today()
    days = [today + timedelta(days=n) for n in range(-1, partitions.AHEAD + 1)]
    with driver.cursor() as cursor:
        partitions.ensure(cursor, days)
    driver.commit()


def check(url: str) -> list[str]:
    """What stands between this database and a working ledger, each with its remedy; empty when all is well.

    Raises LedgerUnavailable where Postgres is away.
    """
    with connect(url) as connection:
        return _problems(connection)


def require_migrated(url: str) -> None:
    """Raise NotMigrated where the database lacks what this version needs, LedgerUnavailable where Postgres is away.

    A database of a newer version has it all: while a fleet is upgraded, older processes go on there.
    """
    with connect(url) as connection:
        have, want, known = _revisions(connection)
    if have is None:
        raise NotMigrated("The database has no Headrace tables.")
    if have != want and have in known:
        raise NotMigrated(f"The database is at migration {have}, this version needs {want}.")


def _revisions(connection: Connection) -> tuple[str | None, str | None, set[str]]:
    """The database's migration, the newest that this version knows, and all of those."""
    script = ScriptDirectory.from_config(_config(connection))
    known = {step.revision for step in script.walk_revisions()}
    return MigrationContext.configure(connection).get_current_revision(), script.get_current_head(), known


def _problems(connection: Connection) -> list[str]:
    have, want, known = _revisions(connection)
    if have is None:
        return ["The database has no Headrace tables. Run `headrace migrate`."]
    if have != want:
        remedy = (
            "Run `headrace migrate`."
            if have in known
            else "It was made by a newer Headrace; upgrade this one."
        )
        return [f"The database is at migration {have}, this version needs {want}. {remedy}"]
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor:
        days = partitions.existing(cursor)
    missing = [day for n in (0, 1) if (day := partitions.today() + timedelta(days=n)) not in days]
    return [
        f"There is no partition for {day}. Run `headrace migrate`, and keep a recorder running."
        for day in missing
    ]


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", "headrace:migrations")
    config.attributes["connection"] = connection
    return config
