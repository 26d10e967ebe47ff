"""What may be forgotten: days long over, named jobs that ended then, and what else has served its time."""

from __future__ import annotations

from datetime import date, timedelta

from headrace.ledger import partitions
from headrace.ledger.database import Database, Rows

CHUNK = 10_000

# Jobs in the catch-all have no day of their own to go with. After this their ids are free again.
_FORGET_NAMED = """
WITH old AS (
    DELETE FROM jobs_named WHERE id IN (
        SELECT id FROM jobs_named WHERE state > 1 AND finished_at < now() - %(keep)s
        ORDER BY id LIMIT %(chunk)s FOR UPDATE SKIP LOCKED
    ) RETURNING id
), their_results AS (DELETE FROM results_named WHERE id IN (SELECT id FROM old)),
   their_attempts AS (DELETE FROM attempts_named WHERE id IN (SELECT id FROM old))
SELECT count(*) FROM old
"""

_OLD = (
    "DELETE FROM workers WHERE alive_until < now() - %s",
    "DELETE FROM cancels WHERE asked_at < now() - %s",
    "DELETE FROM rejections WHERE rejected_at < now() - %s",
    "DELETE FROM settled_letters WHERE settled_at < now() - %s",
)

# A day or all named jobs are read through, row by row: that may take longer than a transaction of workers is allowed.
# Postgres leaves a timer of the transaction that runs already as it is, unless it was switched off first.
_UNHURRIED = """
SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout';
SELECT set_config(name, '10min', true) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')
"""

# Writers are kept out for the moment it takes, so that no count is lost between the sum and the delete. They also wait
# while we wait for the ones before them: not for long.
_DRAINED = """
SET LOCAL lock_timeout = '2s';
LOCK TABLE tier_counts IN SHARE ROW EXCLUSIVE MODE;
DELETE FROM tier_counts USING (
    SELECT pool, tier, minute FROM tier_counts WHERE minute < now() - interval '1 hour'
    GROUP BY pool, tier, minute HAVING sum(submitted) = sum(finished)
) drained
WHERE tier_counts.pool = drained.pool AND tier_counts.tier = drained.tier AND tier_counts.minute = drained.minute
"""


def retire(database: Database, keep: timedelta) -> list[str]:
    """Forget what ended longer than `keep` ago; return the names of the days dropped.

    Days, named jobs and the rest are each tried, whatever becomes of the others. Then the last failure is raised.
    """
    try:
        days = database.transaction(_retirable, partitions.today() - keep)
        return [f"{day:%Y%m%d}" for day in days if database.once(_drop, day)]
    finally:
        try:
            while database.transaction(_forget_named, keep) == CHUNK:
                pass
        finally:
            database.transaction(_forget_rest, keep)


def drain(cursor: Rows) -> None:
    """Drop the minutes of `tier_counts` in which nothing is left to do."""
    cursor.execute(_DRAINED)


def _retirable(cursor: Rows, before: date) -> list[date]:
    cursor.execute(_UNHURRIED)
    return partitions.retirable(cursor, before)


def _drop(cursor: Rows, day: date) -> bool:
    cursor.execute(_UNHURRIED)
    return partitions.drop(cursor, day)


def _forget_named(cursor: Rows, keep: timedelta) -> int:
    cursor.execute(_UNHURRIED)
    (count,) = cursor.execute(_FORGET_NAMED, {"keep": keep, "chunk": CHUNK}).fetchone() or (0,)
    return int(count)


def _forget_rest(cursor: Rows, keep: timedelta) -> None:
    cursor.execute(_UNHURRIED)
    for statement in _OLD:
        cursor.execute(statement, (keep,))
