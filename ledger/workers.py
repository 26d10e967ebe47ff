"""Heartbeats: a lease costs one row a worker, not one a job. The database's clock is the only one that counts."""

from __future__ import annotations

from headrace.ledger.database import Rows

_BEAT = """
INSERT INTO workers (worker, pool, model, alive_until) VALUES (%s, %s, %s, now() + make_interval(secs => %s))
ON CONFLICT (worker) DO UPDATE SET alive_until = excluded.alive_until
"""

_LEAVE = "UPDATE workers SET alive_until = now() WHERE worker = %s AND alive_until > now()"


def heartbeat(cursor: Rows, worker: str, pool: str, model: str, ttl: float) -> None:
    """Alive for `ttl` seconds more."""
    cursor.execute(_BEAT, (worker, pool, model, ttl))


def leave(cursor: Rows, worker: str) -> None:
    """Alive no longer."""
    cursor.execute(_LEAVE, (worker,))
