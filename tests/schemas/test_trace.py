"""Trace context: a good one goes on, a bad one is dropped whole."""

import pytest

from headrace.schemas.trace import MOST_PARENT_BYTES, MOST_STATE_BYTES, trace_of

GOOD = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATE = ("tracestate", b"vendor=1")


def test_a_trace_goes_on_with_its_state_and_without_what_else_came() -> None:
    assert trace_of([STATE, ("x", b"1"), ("traceparent", GOOD)]) == [("traceparent", GOOD), STATE]


def test_a_later_version_may_say_more() -> None:
    later = b"01" + GOOD[2:] + b"-what-the-future-brings"
    assert trace_of([("traceparent", later)]) == [("traceparent", later)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        b"ff" + GOOD[2:],
        GOOD.upper(),
        GOOD + b"-more",  # version 00 has four fields
        GOOD + b"\n",
        b"00-" + b"0" * 32 + GOOD[35:],
        GOOD[:36] + b"0" * 16 + GOOD[52:],
        None,
    ],
)
def test_a_malformed_trace_is_dropped_with_its_state(value: bytes | None) -> None:
    assert trace_of([("traceparent", value), STATE]) == []


def test_two_traces_are_none() -> None:
    assert trace_of([("traceparent", GOOD), ("traceparent", GOOD)]) == []


def test_a_parent_that_is_too_long_is_dropped_with_its_state() -> None:
    later = b"01" + GOOD[2:] + b"-" + b"x" * MOST_PARENT_BYTES
    assert trace_of([("traceparent", later[:MOST_PARENT_BYTES])]) == [
        ("traceparent", later[:MOST_PARENT_BYTES])
    ]
    assert trace_of([("traceparent", later[: MOST_PARENT_BYTES + 1]), STATE]) == []


@pytest.mark.parametrize(
    "states",
    [
        [b"vendor=" + b"x" * MOST_STATE_BYTES],
        [b"a=" + b"x" * (MOST_STATE_BYTES // 2), b"b=" + b"x" * (MOST_STATE_BYTES // 2)],
        [b",".join(b"v%d=1" % n for n in range(33))],
        [b"v%d=1" % n for n in range(33)],
    ],
)
def test_a_state_that_is_too_long_is_dropped_and_its_trace_goes_on(states: list[bytes]) -> None:
    headers = [("traceparent", GOOD), *(("tracestate", state) for state in states)]
    assert trace_of(headers) == [("traceparent", GOOD)]


@pytest.mark.parametrize("state", [b"vendor=" + b"x" * 512, b",".join(b"v%d=1" % n for n in range(32))])
def test_a_state_as_long_as_w3c_asks_to_carry_goes_on(state: bytes) -> None:
    headers = [("traceparent", GOOD), ("tracestate", state)]
    assert trace_of(headers) == headers
