"""Rows for the ledger's tests, each field settable."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import psycopg

from headrace.ledger import AttemptRow, JobRow, Ledger, OutcomeRow, RejectionRow
from headrace.schemas import JobResult, JobState, named_key, uuid7

TOPIC = "headrace.jobs.v1.standard"
_offsets = itertools.count()


def job(content: str = "content", **fields: Any) -> JobRow:
    """A job of batch b1, from an offset of its own."""
    row = JobRow(
        id=uuid7(),
        tenant="acme",
        tier="standard",
        content_sha=sha256(content.encode()).digest(),
        src_topic=TOPIC,
        src_partition=0,
        src_offset=next(_offsets),
        submitted_at=datetime.now(UTC),
        batch_id="b1",
    )
    return replace(row, **fields)


def jobs(count: int, **fields: Any) -> list[JobRow]:
    """Several of them."""
    return [job(**fields) for _ in range(count)]


def named(name: str, content: str = "content", **fields: Any) -> JobRow:
    """A job whose id is `ff` and a hash, as one with a job_id of its own making."""
    return job(content, id=named_key("acme", name), job_id=name, **fields)


def attempt(row: JobRow, worker: str = "w1", **fields: Any) -> AttemptRow:
    """The first attempt at a job."""
    return AttemptRow(row, worker, **fields)


def outcome(row: JobRow, state: JobState = JobState.SUCCEEDED, **fields: Any) -> OutcomeRow:
    """The end of a job that was started once."""
    given = OutcomeRow(row, state, body(row, state), attempt=1, prompt_tokens=10, completion_tokens=3)
    return replace(given, **fields)


def body(row: JobRow, state: JobState = JobState.SUCCEEDED) -> bytes:
    """An encoded result."""
    return JobResult(id=row.id, tenant=row.tenant, batch_id=row.batch_id, state=state).encode()


def rejection(offset: int | None = None, **fields: Any) -> RejectionRow:
    """A record of batch b1 that could not be parsed."""
    place = next(_offsets) if offset is None else offset
    return replace(RejectionRow(TOPIC, 0, place, "acme", "invalid_json", "no JSON", batch_id="b1"), **fields)


def state(ledger: Ledger, id: UUID) -> JobState:
    """The stored state of a job that is there."""
    status = ledger.job(id)
    assert status is not None
    return status.state


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """What an analyst sees."""
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()  # type: ignore[arg-type]
