"""Batches opened and closed, and cancels, from the control topic: in any order, any number of times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from psycopg.types.json import Jsonb

from headrace.ledger.database import Rows
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, CancelJob, ControlMessage, clean_text
from headrace.schemas.wire import clean_json

M = TypeVar("M", BatchOpened, BatchClosed)

# The first message of a kind says it: a repeat changes nothing.
_OPEN = """
INSERT INTO batches (tenant, batch_id, opened_at, expires_at, input_ref, metadata)
VALUES (%s, %s, coalesce(%s, now()), %s, %s, %s)
ON CONFLICT (tenant, batch_id) DO UPDATE SET
    opened_at = excluded.opened_at, expires_at = excluded.expires_at,
    input_ref = excluded.input_ref, metadata = excluded.metadata
WHERE batches.opened_at IS NULL
"""

_CLOSE = """
INSERT INTO batches (tenant, batch_id, expected, closed_at) VALUES (%s, %s, %s, coalesce(%s, now()))
ON CONFLICT (tenant, batch_id) DO UPDATE SET expected = excluded.expected, closed_at = excluded.closed_at
WHERE batches.closed_at IS NULL
"""

_CANCEL = "INSERT INTO cancels (tenant, kind, target) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"

IS_CANCELLED = """
(EXISTS (SELECT FROM cancels c WHERE c.tenant = {job}.tenant AND c.kind = 'job' AND c.target = {job}.id::text)
 OR EXISTS (SELECT FROM cancels c WHERE c.tenant = {job}.tenant AND c.kind = 'batch' AND c.target = {job}.batch_id))
"""
"""Whether a row with id, tenant and batch_id is cancelled; cancels outlive their jobs' coming and going."""


def apply(cursor: Rows, messages: Sequence[ControlMessage]) -> None:
    """Take note of the messages; those of one kind in key order, so that two recorders do not deadlock."""
    opened = _each_once(m for m in messages if isinstance(m, BatchOpened))
    closed = _each_once(m for m in messages if isinstance(m, BatchClosed))
    cursor.executemany(
        _OPEN,
        [(*key, m.opened_at, m.expires_at, *_texts(m)) for key, m in opened],
    )
    cursor.executemany(_CLOSE, [(*key, m.expected, m.closed_at) for key, m in closed])
    cursor.executemany(
        _CANCEL, sorted({_target(m) for m in messages if isinstance(m, CancelJob | CancelBatch)})
    )


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
