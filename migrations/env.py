"""Alembic's entry: runs the migrations on the connection it is handed, or on `-x url=...`.

The environment is not read. A migration that has to wait for a lock gives up soon and can be run again: while it
waits, everybody who needs the same table waits behind it.
"""

from alembic import context
from sqlalchemy import Connection, text

from headrace.ledger.database import connect
from headrace.ledger.partitions import is_partition
from headrace.ledger.tables import metadata

LOCK_TIMEOUT = "5s"
STATEMENT_TIMEOUT = "5min"
# Two deployments may migrate at once; the second waits, and then finds nothing to do.
ADVISORY_LOCK = 0x6865616472616365


def _include_name(name: str | None, kind: str, parents: object) -> bool:
    return not (kind == "table" and name is not None and is_partition(name))


def run(connection: Connection) -> None:
    """Run what was asked for, each migration in a transaction of its own."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        include_name=_include_name,
        transaction_per_migration=True,
    )
    connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
    connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT}'"))
    connection.execute(text(f"SET statement_timeout = '{STATEMENT_TIMEOUT}'"))
    connection.commit()
    try:
        with context.begin_transaction():
            context.run_migrations()
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})
        connection.commit()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with connect(context.get_x_argument(as_dictionary=True)["url"]) as own:
        run(own)
