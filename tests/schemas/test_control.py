"""Batches opened and closed, jobs and batches cancelled."""

from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import (
    BatchClosed,
    BatchOpened,
    CancelBatch,
    CancelJob,
    ControlMessage,
    Unparsable,
    named_key,
    parse_control,
)

ID = UUID("b4e151dd-fe31-4449-840a-54cb7c5a6902")
NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        (
            BatchOpened(tenant="acme", batch_id="b", opened_at=NOW, expires_at=NOW, metadata={"a": "b"}),
            "acme/b",
        ),
        (BatchClosed(tenant="acme", batch_id="b", expected=5, closed_at=NOW), "acme/b"),
        (CancelBatch(tenant="acme", batch_id="b"), "acme/b"),
        (CancelJob(tenant="acme", id=ID), f"acme/{ID}"),
        (CancelJob(tenant="acme", job_id="j"), f"acme/{named_key('acme', 'j')}"),
    ],
)
def test_a_message_reads_back_as_it_was_written(message: ControlMessage, key: str) -> None:
    encoded_key, value, headers = message.encode()
    assert parse_control(value) == message
    assert encoded_key == key.encode()
    assert dict(headers)["headrace-tenant"] == b"acme"


def test_a_cancel_finds_the_job_by_either_name() -> None:
    assert CancelJob(tenant="acme", id=ID).key == ID
    assert CancelJob(tenant="acme", job_id="j").key == named_key("acme", "j")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "no value"),
        (b"[]", "send an object"),
        (b"{}", "type"),
        (
            b'{"type": "batch_exploded"}',
            "^type must be one of batch_opened, batch_closed, cancel_job, cancel_batch$",
        ),
        (b'{"type": []}', "^type must be one of"),
        (b'{"type": "batch_closed", "batch_id": "b"}', "expected"),
        (
            b'{"type": "batch_closed", "batch_id": "b", "expected": -1}',
            "^expected must be a whole number, 0 or more",
        ),
        (b'{"type": "batch_closed", "batch_id": "b", "expected": 1e30}', "expected"),
        (
            b'{"type": "batch_opened", "batch_id": "b", "expires_at": "2027-01-01T00:00:00"}',
            "^expires_at must be a time with a zone",
        ),
        (
            b'{"type": "batch_opened", "batch_id": "b", "expires_at": "0001-01-01T00:00:00+14:00"}',
            "^expires_at must lie between the years 1 and 9999 in UTC$",
        ),
        (
            b'{"type": "batch_closed", "batch_id": "b", "expected": 1, "closed_at": "9999-12-31T23:59:59-14:00"}',
            "^closed_at must lie between the years 1 and 9999 in UTC$",
        ),
        (b'{"type": "cancel_batch", "batch_id": ""}', "^batch_id must be a string of 1 to 256 characters$"),
        (b'{"type": "cancel_batch", "batch_id": "a\\u0000"}', "batch_id"),
        (b'{"type": "cancel_job"}', "exactly one of id and job_id"),
        (b'{"type": "cancel_job", "id": "x"}', "^id must be a UUID"),
        (
            b'{"type": "cancel_job", "id": "01890000-0000-7000-8000-000000000000", "job_id": "x"}',
            "^id must not stand beside job_id",
        ),
        (
            b'{"type": "batch_opened", "batch_id": "b", "metadata": {"a": 1}}',
            "^metadata must be an object of up to",
        ),
    ],
)
def test_anything_else_is_unparsable_and_says_why(value: bytes | None, words: str) -> None:
    with pytest.raises(Unparsable, match=words):
        parse_control(value)


@given(st.binary())
def test_no_bytes_crash_the_reader(value: bytes) -> None:
    with pytest.raises(Unparsable):
        parse_control(value)
