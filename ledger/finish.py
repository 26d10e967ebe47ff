"""The guarded write that ends a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from headrace.ledger.counters import RETURNING, SUMMARY, Change, Tally, changes
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
    """End those that have a row and have not ended, and everybody's attempt. `outcomes` names each id once."""
    days, tally = stage(cursor, _COLUMNS, map(_values, outcomes)), Tally()
    done = changes(cursor.execute(_UPDATE, days))
    tally.finished(done)
    if any(outcome.attempt for outcome in outcomes):
        cursor.execute(_END_ATTEMPTS, days)
    tally.write(cursor)
    return Finished(_ids(done))


def finish_absent(cursor: Rows, outcomes: Sequence[OutcomeRow]) -> Finished:
    """The same for what `finish` left out: a job without a row gets one (see staging.insert_absent). Says who won."""
    days, tally = stage(cursor, _COLUMNS, map(_values, outcomes)), Tally()
    inserted = changes(cursor.execute(_INSERT, days))
    tally.inserted(inserted)
    changed, winners = _ids(inserted), {}
    if len(changed) < len(outcomes):  # the recorder may have inserted it at this very moment
        done = changes(cursor.execute(_UPDATE, days))
        tally.finished(done)
        changed |= _ids(done)
        stored = cursor.execute(_WINNERS, {"changed": list(changed), **days})
        winners = {id: body.encode() for id, body in stored}
    tally.write(cursor)
    return Finished(changed, winners)


def _ids(done: Iterable[Change]) -> frozenset[UUID]:
    return frozenset(id for change in done for id in change.ids)


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
