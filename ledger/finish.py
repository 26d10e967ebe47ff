"""The one guarded write that ends a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from headrace.ledger.counters import RETURNING, SUMMARY, Tally, changes
from headrace.ledger.database import Rows
from headrace.ledger.partitions import within
from headrace.ledger.rows import Finished, OutcomeRow
from headrace.ledger.staging import (
    JOB_COLUMNS,
    LOCKED,
    OUTCOME_COLUMNS,
    insert_absent,
    job_values,
    stage,
)
from headrace.schemas import JobState, clean_text

_RESULT = ("body", "error", "uri", "bytes", "sha256")
_COLUMNS = (*JOB_COLUMNS, *OUTCOME_COLUMNS, *_RESULT)

_STORED = f"""
stored AS (
    INSERT INTO results (id, run, {", ".join(_RESULT)})
    SELECT id, run, {", ".join(_RESULT)} FROM incoming WHERE id IN (SELECT id FROM changed)
    ON CONFLICT DO NOTHING
)
"""

_INSERT = f"""
WITH changed AS ({insert_absent({"finished_at": "now()"} | {name: name for name in OUTCOME_COLUMNS})} {RETURNING}),
{_STORED} {SUMMARY}
"""

_UPDATE = f"""
WITH changed AS (
    UPDATE jobs SET state = new.state, finished_at = now(), {", ".join(f"{name} = new.{name}" for name in OUTCOME_COLUMNS)}
    FROM {LOCKED} new
    WHERE jobs.id = new.id AND {within("jobs")} AND jobs.run = new.run AND jobs.content_sha = new.content_sha
      AND jobs.state IN ({JobState.QUEUED.code}, {JobState.RUNNING.code})
    {RETURNING}
), {_STORED} {SUMMARY}
"""

_WINNERS = f"""
SELECT incoming.id, results.body::text FROM incoming
JOIN jobs ON jobs.id = incoming.id AND {within("jobs")}
    AND jobs.run = incoming.run AND jobs.content_sha = incoming.content_sha
JOIN results ON results.id = jobs.id AND {within("results")} AND results.run = jobs.run
WHERE incoming.id <> ALL(%(changed)s)
"""

_END_ATTEMPTS = f"""
UPDATE attempts SET ended_at = now() FROM (SELECT id, run, attempt FROM incoming ORDER BY id) done
WHERE attempts.id = done.id AND {within("attempts")} AND attempts.run = done.run AND attempts.attempt = done.attempt
  AND ended_at IS NULL
"""


def finish(cursor: Rows, outcomes: Sequence[OutcomeRow]) -> Finished:
    """End the jobs that have not ended. `outcomes` names each id once."""
    days = stage(cursor, _COLUMNS, map(_values, outcomes))
    tally = Tally()
    changed: set[UUID] = set()
    # Whatever ran has a row. Where one is missing, the recorder may insert it at this very moment.
    for statement, count in ((_UPDATE, tally.finished), (_INSERT, tally.inserted), (_UPDATE, tally.finished)):
        if len(changed) < len(outcomes):
            done = changes(cursor.execute(statement, days))
            count(done)
            changed.update(id for change in done for id in change.ids)
    if any(outcome.attempt for outcome in outcomes):
        cursor.execute(_END_ATTEMPTS, days)
    winners: dict[UUID, bytes] = {}
    if len(changed) < len(outcomes):
        cursor.execute(_WINNERS, {"changed": list(changed), **days})
        winners = {id: body.encode() for id, body in cursor.fetchall()}
    tally.write(cursor)
    return Finished(frozenset(changed), winners)


def _values(outcome: OutcomeRow) -> tuple[Any, ...]:
    return (
        *job_values(outcome.job, outcome.state.code, outcome.run, outcome.attempt),
        outcome.prompt_tokens,
        outcome.cached_tokens,
        outcome.completion_tokens,
        outcome.error_code,
        outcome.body.decode("utf-8", "replace"),
        None if outcome.error is None else clean_text(outcome.error),
        outcome.uri,
        outcome.size,
        outcome.sha256,
    )
