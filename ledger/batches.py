"""Batches opened and closed, and cancels, from the control topic: in any order, any number of times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from psycopg.types.json import Jsonb

from headrace.ledger.database import Rows
from headrace.ledger.staging import columns
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, CancelJob, ControlMessage, clean_text
from headrace.schemas.wire import clean_json

M = TypeVar("M", BatchOpened, BatchClosed)

# Every batch that is spoken of gets its row first, in key order, as counters do it: so nobody waits in a circle.
_NAME = """
INSERT INTO batches (tenant, batch_id) SELECT * FROM unnest(%s::text[], %s::text[])
ON CONFLICT (tenant, batch_id) DO UPDATE SET said_at = now()
"""

# The first message says it: a repeat changes nothing else.
_OPEN = """
UPDATE batches SET opened_at = coalesce(said.opened_at, now()), expires_at = said.expires_at,
    input_ref = said.input_ref, metadata = said.metadata
FROM unnest(%s::text[], %s::text[], %s::timestamptz[], %s::timestamptz[], %s::text[], %s::jsonb[])
    AS said (tenant, batch_id, opened_at, expires_at, input_ref, metadata)
WHERE batches.tenant = said.tenant AND batches.batch_id = said.batch_id AND batches.opened_at IS NULL
"""

# The largest count holds, in whatever order they come: a file that has grown is sent again under its idempotency key. Of
# equal ones the latest sending that has a name holds, which has sent again what was rejected of the earlier ones.
_CLOSE = """
UPDATE batches SET expected = said.expected, submission = said.submission,
    closed_at = CASE WHEN batches.expected = said.expected THEN batches.closed_at ELSE coalesce(said.closed_at, now()) END
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::timestamptz[], %s::text[])
    AS said (tenant, batch_id, expected, closed_at, submission)
WHERE batches.tenant = said.tenant AND batches.batch_id = said.batch_id
    AND (batches.closed_at IS NULL OR batches.expected < said.expected
         OR (batches.expected = said.expected AND said.submission IS NOT NULL
             AND said.submission IS DISTINCT FROM batches.submission))
"""

_CANCEL = """
INSERT INTO cancels (tenant, kind, target) SELECT * FROM unnest(%s::text[], %s::text[], %s::text[])
ON CONFLICT DO NOTHING
"""

IS_CANCELLED = """
(EXISTS (SELECT FROM cancels c WHERE c.tenant = {job}.tenant AND c.kind = 'job' AND c.target = {job}.id::text)
 OR EXISTS (SELECT FROM cancels c WHERE c.tenant = {job}.tenant AND c.kind = 'batch' AND c.target = {job}.batch_id))
"""
"""Whether a row with id, tenant and batch_id is cancelled; cancels outlive their jobs' coming and going."""


def apply(cursor: Rows, messages: Sequence[ControlMessage]) -> None:
    """Take note of the messages."""
    opened = _each_once(m for m in messages if isinstance(m, BatchOpened))
    latest_first = [m for m in reversed(messages) if isinstance(m, BatchClosed)]
    closed = _each_once(
        sorted(latest_first, key=lambda m: (m.expected, m.submission is not None), reverse=True)
    )
    cancels = sorted({_target(m) for m in messages if isinstance(m, CancelJob | CancelBatch)})
    if opened or closed:
        cursor.execute(_NAME, columns(sorted({key for key, _ in (*opened, *closed)})))
    if opened:
        lines = [(*key, m.opened_at, m.expires_at, *_texts(m)) for key, m in opened]
        cursor.execute(_OPEN, columns(lines))
    if closed:
        counts = [(*key, m.expected, m.closed_at, m.submission) for key, m in closed]
        cursor.execute(_CLOSE, columns(counts))
    if cancels:
        cursor.execute(_CANCEL, columns(cancels))


def _each_once(messages: Iterable[M]) -> list[tuple[tuple[str, str], M]]:
    first: dict[tuple[str, str], M] = {}
    for message in messages:
        first.setdefault((message.tenant, message.batch_id), message)
    return sorted(first.items(), key=lambda item: item[0])


def _texts(message: BatchOpened) -> tuple[str | None, Jsonb]:
    """Its free text, as Postgres takes it."""
    reference = None if message.input_ref is None else clean_text(message.input_ref)
    return reference, Jsonb(clean_json(message.metadata))


def _target(message: CancelJob | CancelBatch) -> tuple[str, str, str]:
    if isinstance(message, CancelBatch):
        return message.tenant, "batch", message.batch_id
    return message.tenant, "job", str(message.key)
