"""What may be forgotten: days long over, named jobs that ended then, batches of which no job is left, and what else has
served its time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date, timedelta

from headrace.ledger import partitions
from headrace.ledger.counters import Tally
from headrace.ledger.database import Database, Rows
from headrace.ledger.staging import columns

CHUNK = 10_000
BATCHES = 100  # forgotten in one transaction: writers wait for it

# Jobs in the catch-all have no day of their own to go with. After this their ids are free again. None ended before it was
# submitted, and that time has an index here: what is young is not read.
_FORGET_NAMED = """
WITH old AS (
    DELETE FROM jobs_named WHERE id IN (
        SELECT id FROM jobs_named
        WHERE submitted_at < now() - %(keep)s AND state > 1 AND finished_at < now() - %(keep)s
        ORDER BY submitted_at LIMIT %(chunk)s FOR UPDATE SKIP LOCKED
    ) RETURNING id
), their_results AS (DELETE FROM results_named WHERE id IN (SELECT id FROM old)),
   their_attempts AS (DELETE FROM attempts_named WHERE id IN (SELECT id FROM old))
SELECT count(*) FROM old
"""

_OLD = (
    "DELETE FROM workers WHERE alive_until < now() - %s",
    "DELETE FROM cancels WHERE asked_at < now() - %s",
    "DELETE FROM settled_letters WHERE settled_at < now() - %s",
)

# Returned are those that `batch_progress` takes off the counter again, as they stand for no line (see `views`). Once they are
# not there to be taken off, the counter must not hold them either, or the batch would be complete before its time.
_FORGET_REJECTIONS = """
WITH old AS (
    DELETE FROM rejections WHERE rejected_at < now() - %s
    RETURNING tenant, batch_id, submission, same_batch, reopened
)
SELECT tenant, batch_id FROM old JOIN batches b USING (tenant, batch_id)
WHERE NOT old.reopened AND old.submission IS NOT NULL AND (old.submission <> b.submission OR old.same_batch)
"""

# Nothing was said of the batch for as long as jobs are kept, and no job and no rejected record of it is left. Its
# counters are of no use any more: they would count for jobs that come again.
_BARE = """
b.said_at < now() - %(keep)s
AND NOT EXISTS (SELECT FROM jobs WHERE jobs.tenant = b.tenant AND jobs.batch_id = b.batch_id)
AND NOT EXISTS (SELECT FROM rejections r WHERE r.tenant = b.tenant AND r.batch_id = b.batch_id)
"""
_BARE_BATCHES = f"SELECT tenant, batch_id FROM batches b WHERE {_BARE}"

# Whoever counts something against a batch first makes sure of its row here (see `counters`), with its jobs written but not
# yet to be seen: so those are waited for, and others wait, but neither for long.
_KEEP_COUNTERS_OUT = """
SET LOCAL lock_timeout = '2s';
LOCK TABLE batches IN SHARE ROW EXCLUSIVE MODE;
"""
_FORGET_BATCHES = f"""
WITH gone AS (
    DELETE FROM batches b USING unnest(%(tenants)s::text[], %(batch_ids)s::text[]) AS old (tenant, batch_id)
    WHERE b.tenant = old.tenant AND b.batch_id = old.batch_id AND {_BARE}
    RETURNING b.tenant, b.batch_id
)
DELETE FROM batch_counts c USING gone WHERE c.tenant = gone.tenant AND c.batch_id = gone.batch_id
"""

# A day is read through, row by row: that may take longer than a transaction of workers is allowed.
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

    Days, named jobs, rejections, the rest and batches are each tried, whatever becomes of the others. Then the last
    failure is raised.
    """
    with ExitStack() as then:  # the last one first
        then.callback(_forget_batches, database, keep)
        then.callback(database.transaction, _forget_rest, keep)
        then.callback(database.transaction, _forget_rejections, keep)
        then.callback(_forget_all_named, database, keep)
        days = database.transaction(_retirable, partitions.today() - keep)
        return [f"{day:%Y%m%d}" for day in days if database.once(_drop, day)]


def drain(cursor: Rows) -> None:
    """Drop the minutes of `tier_counts` in which nothing is left to do."""
    cursor.execute(_DRAINED)


def _retirable(cursor: Rows, before: date) -> list[date]:
    cursor.execute(_UNHURRIED)
    return partitions.retirable(cursor, before)


def _drop(cursor: Rows, day: date) -> bool:
    cursor.execute(_UNHURRIED)
    return partitions.drop(cursor, day)


def _forget_all_named(database: Database, keep: timedelta) -> None:
    while database.transaction(_forget_named, keep) == CHUNK:
        pass


def _forget_named(cursor: Rows, keep: timedelta) -> int:
    cursor.execute(_UNHURRIED)
    (count,) = cursor.execute(_FORGET_NAMED, {"keep": keep, "chunk": CHUNK}).fetchone() or (0,)
    return int(count)


def _forget_rejections(cursor: Rows, keep: timedelta) -> None:
    cursor.execute(_UNHURRIED)
    tally = Tally()
    tally.taken_back(cursor.execute(_FORGET_REJECTIONS, (keep,)).fetchall())
    tally.write(cursor)


def _forget_rest(cursor: Rows, keep: timedelta) -> None:
    cursor.execute(_UNHURRIED)
    for statement in _OLD:
        cursor.execute(statement, (keep,))


def _forget_batches(database: Database, keep: timedelta) -> None:
    """First see which, while nobody waits for it."""
    bare = database.transaction(_bare_batches, keep)
    for first in range(0, len(bare), BATCHES):
        database.once(_forget_bare, bare[first : first + BATCHES], keep)


def _bare_batches(cursor: Rows, keep: timedelta) -> list[tuple[str, str]]:
    cursor.execute(_UNHURRIED)
    return [(tenant, batch_id) for tenant, batch_id in cursor.execute(_BARE_BATCHES, {"keep": keep})]


def _forget_bare(cursor: Rows, batches: Sequence[tuple[str, str]], keep: timedelta) -> None:
    cursor.execute(_KEEP_COUNTERS_OUT)
    tenants, batch_ids = columns(batches)
    cursor.execute(_FORGET_BATCHES, {"keep": keep, "tenants": tenants, "batch_ids": batch_ids})
