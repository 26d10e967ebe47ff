"""Connections and transactions: checked at checkout, held briefly, and the whole transaction retried."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import psycopg
from psycopg import Cursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from sqlalchemy import Connection, Engine, PoolProxiedConnection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import NullPool

from headrace.ledger.errors import LedgerUnavailable, NotMigrated, NotPermitted, NotPostgres, RowRefused

Rows: TypeAlias = Cursor[TupleRow]
P = ParamSpec("P")
T = TypeVar("T")

# A process that is stopped in the middle of a transaction (SIGSTOP, a dead node) must not hold its rows for long, and
# nobody waits for ever. What we join to lies at the newest end of a day and is in memory: at the default page cost the
# planner would rather read the whole day. Set in each transaction, not at login: a pooler between us and Postgres hands out sessions.
# READ COMMITTED, whatever the database's default: a statement must see the row that another writer made just before it.
BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL timezone = 'UTC';
SET LOCAL lock_timeout = '10s';
SET LOCAL statement_timeout = '60s';
SET LOCAL idle_in_transaction_session_timeout = '30s';
SET LOCAL client_min_messages = warning;
SET LOCAL random_page_cost = 1.1;
"""
# From Postgres 17 on. The timeouts above do not run while a client that was stopped owes the rest of a message.
BEGIN_17 = BEGIN + "SET LOCAL transaction_timeout = '60s';"

# How a connection is made, where the address says nothing else. A server that vanished without a word is given up within
# a minute; by itself the system would wait for two hours, and the timeouts above end with the server.
CONNECTION = {
    "connect_timeout": 5,
    "application_name": "headrace",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
# And of the pool's. No prepared statements: PgBouncer in transaction mode may not keep them. autocommit: transactions
# begin with BEGIN.
POOLED = {**CONNECTION, "prepare_threshold": None, "autocommit": True}
# For SQLAlchemy, whose own reading of addresses knows one host alone: libpq reads them instead.
DIALECT = "postgresql+psycopg://"
# Parameters of libpq's that take one of a few words. It looks at them when it connects, and says then that it could not.
_CHOICES = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "gssencmode": ("disable", "prefer", "require"),
    "channel_binding": ("disable", "prefer", "require"),
    "target_session_attrs": ("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
    "load_balance_hosts": ("disable", "random"),
}
_NUMBERS = (
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
)
# How it says of any other that it cannot have that value.
_BAD_VALUE = re.compile(r"connection is bad: (invalid \S+ value: .*)")
# Seconds after which a connection is made anew. Its temporary table keeps the age that it was made at and autovacuum
# leaves it alone: in a session of weeks it would hold up the whole cluster's freezing.
RECYCLE_S = 3600

# SQLSTATEs (or their classes) after which the same transaction may succeed. 57014 is a statement timeout.
_TRANSIENT = ("08", "40001", "40P01", "53", "55P03", "57014", "57P0", "58030", "25006", "25P03", "25P04")
# A value out of range, a broken constraint, a row beyond a limit: this row will never go in.
_REFUSED = ("22", "23", "54")


def parse_url(url: str) -> dict[str, Any]:
    """What libpq reads in `url`, as arguments for psycopg.connect: `host` may be several, comma separated.

    A driver's name, as in `postgresql+psycopg://`, is left out. Raises NotPostgres, which never quotes the password.
    """
    scheme, is_url, rest = url.partition("://")
    kind = scheme.partition("+")[0]
    if not is_url:
        raise NotPostgres("It is no address of a database.")
    if kind not in ("postgresql", "postgres"):
        raise NotPostgres(f"The job table is in Postgres, and this is an address of {kind}.")
    try:
        given = conninfo_to_dict(f"{kind}://{rest}")
    except psycopg.ProgrammingError as error:
        # Of all that libpq says here, this alone cannot quote the password.
        why = str(error).strip() if "query parameter" in str(error) else "libpq cannot read it"
        raise NotPostgres(f"{why[0].upper()}{why[1:]}.") from None
    hosts, ports = (str(given.get(name) or "").split(",") for name in ("host", "port"))
    if any("@" in host for host in hosts):
        raise NotPostgres("Write @ in a user's name or a password as %40.")
    if not all(port.isdecimal() and 0 < int(port) < 65_536 for port in ports if port):
        raise NotPostgres("A port is no number from 1 to 65535.")
    if len(ports) not in (1, len(hosts)):
        raise NotPostgres(
            f"There are {len(hosts)} hosts and {len(ports)} ports: give each its own, or one for all."
        )
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise NotPostgres(f"{name} must be one of {', '.join(choices)}.")
    for name in _NUMBERS:
        if not re.fullmatch(r"-?[0-9]{1,9}", str(given.get(name, 0))):
            raise NotPostgres(f"{name} must be a whole number.")
    return given


def engine(url: str, pool_size: int = 4, pool_timeout: float = 10.0) -> Engine:
    """A pool for `url`. Connects lazily. Raises as `parse_url`."""
    return create_engine(
        DIALECT,
        creator=_connector({**POOLED, **parse_url(url)}),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout,
        pool_pre_ping=True,
        pool_recycle=RECYCLE_S,
    )


@contextmanager
def connect(url: str) -> Iterator[Connection]:
    """One connection outside any pool, for migrations. SQLAlchemy's errors leave it as ours."""
    own = create_engine(DIALECT, creator=_connector({**CONNECTION, **parse_url(url)}), poolclass=NullPool)
    try:
        with own.connect() as connection:
            yield connection
    except DBAPIError as error:
        raise translate(error.orig) if isinstance(error.orig, Exception) else error from error


class Database:
    """Runs transactions on pooled connections.

    Args:
        url: see `engine`.
        pool_size: connections at most.
        retry_for: seconds for which a failed transaction is tried again.
    """

    def __init__(self, url: str, pool_size: int, retry_for: float) -> None:
        self._engine = engine(url, pool_size, pool_timeout=max(retry_for, 1.0))
        self._retry_for = retry_for

    def close(self) -> None:
        """Close the pool's idle connections; those in use are closed as they come back."""
        self._engine.dispose()

    def transaction(self, work: Callable[Concatenate[Rows, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work(cursor, ...)` in a transaction and commit it; on a lost connection or a deadlock, all of it again.

        `work` must therefore be safe to repeat, also after a commit whose answer was lost.

        Raises:
            RowRefused: Postgres will never take what was sent.
            LedgerUnavailable: nothing worked for `retry_for` seconds.
        """
        return self._repeat(self._retry_for, work, *args, **kwargs)

    def once(self, work: Callable[Concatenate[Rows, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `transaction`, without a second try: for what others wait behind, and what comes again by itself."""
        return self._repeat(0.0, work, *args, **kwargs)

    def _repeat(
        self, seconds: float, work: Callable[Concatenate[Rows, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        give_up = time.monotonic() + seconds
        for delay in _backoff():
            try:
                return self._try(work, *args, **kwargs)
            except PoolTimeout as error:
                raise LedgerUnavailable("every connection of the pool is in use") from error
            except (psycopg.Error, UnicodeEncodeError) as error:
                failure = translate(error)
                if not isinstance(failure, LedgerUnavailable) or time.monotonic() + delay > give_up:
                    # What Postgres says of a row may quote it, and prompts stay out of logs: only the cause goes on.
                    raise failure from (None if isinstance(failure, RowRefused) else error)
            time.sleep(delay)
        raise AssertionError("backoff never ends")

    def _try(self, work: Callable[Concatenate[Rows, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        pooled = self._check_out()
        connection = pooled.driver_connection
        assert isinstance(connection, psycopg.Connection)
        try:
            with connection.cursor() as cursor:
                cursor.execute(BEGIN_17 if connection.info.server_version >= 170_000 else BEGIN)
                result = work(cursor, *args, **kwargs)
            connection.commit()
            return result
        except psycopg.InterfaceError as error:
            # The driver found it out by itself. On a sound connection that is a mistake of ours.
            if not connection.closed:
                raise
            raise psycopg.OperationalError(str(error)) from error
        finally:
            if connection.closed:
                pooled.invalidate()
            pooled.close()

    def _check_out(self) -> PoolProxiedConnection:
        try:
            return self._engine.raw_connection()
        except psycopg.InterfaceError as error:  # from the ping, or while connecting: nothing of ours ran yet
            raise psycopg.OperationalError(str(error)) from error


def translate(error: Exception) -> Exception:
    """What a failed transaction means to our callers; the error itself where it means nothing special."""
    if isinstance(error, UnicodeEncodeError):
        return RowRefused("a lone surrogate cannot be stored")
    state = getattr(error, "sqlstate", None)
    if state is None:
        # The driver itself: a value it cannot send, or a connection that is gone.
        if isinstance(error, psycopg.DataError):
            return RowRefused(str(error))
        if isinstance(error, psycopg.OperationalError):
            bad_value = _BAD_VALUE.match(str(error))
            return NotPostgres(f"{bad_value[1]}.") if bad_value else LedgerUnavailable(str(error))
        return error
    cause = f"{error.diag.message_primary} ({state})" if isinstance(error, psycopg.Error) else str(error)
    if state.startswith(_TRANSIENT):
        return LedgerUnavailable(cause)
    if state.startswith(_REFUSED):
        return RowRefused(cause)
    if state == "42501":
        return NotPermitted(f"{cause}; deploy/roles.sql grants what each process needs")
    if state in ("42P01", "42703", "42883"):
        return NotMigrated(f"The job table is not as this version needs it: {cause}.")
    return error


def _connector(arguments: Mapping[str, Any]) -> Callable[[], psycopg.Connection]:
    return lambda: psycopg.connect(**arguments)


def _backoff() -> Iterator[float]:
    """Seconds to wait before each next try: 50 ms, doubling to 2 s, with jitter so that workers do not march in step."""
    delay = 0.05
    while True:
        yield delay * random.uniform(0.5, 1.0)
        delay = min(delay * 2, 2.0)
