"""The W3C trace context that travels with a job and goes on with its result."""

import re
from collections.abc import Iterable

from headrace.schemas.topics import TRACEPARENT, TRACESTATE

# version-trace-parent-flags. Later versions may append fields; ff is no version, and ids of zeros are none.
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(
    rb"(?!ff)(?:00|(?!00)([0-9a-f]{2}))-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?(1)(?:-.*)?)"
)

# A trace must not make a record of a result that Kafka refuses. W3C asks to carry 512 bytes of state at least, in at most
# 32 members, and lets what is longer be dropped; version 00 of a parent has 55 bytes.
MOST_PARENT_BYTES = 512
MOST_STATE_BYTES = 7680
MOST_STATE_MEMBERS = 32


def trace_of(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes]]:
    """The headers that continue a record's trace, of 8 KiB at most.

    None of them where the traceparent is malformed, too long or there twice; a state that is too long is left out.
    """
    headers = list(headers)
    parents = [value for name, value in headers if name == TRACEPARENT and value is not None]
    if len(parents) != 1 or len(parents[0]) > MOST_PARENT_BYTES or not _TRACEPARENT.fullmatch(parents[0]):
        return []
    states = [(name, value) for name, value in headers if name == TRACESTATE and value]
    return [(TRACEPARENT, parents[0]), *(states if _is_carried([value for _, value in states]) else [])]


def _is_carried(states: list[bytes]) -> bool:
    """Whether a state, which may be spread over several headers, is within its limits."""
    members = sum(1 + state.count(b",") for state in states)
    return members <= MOST_STATE_MEMBERS and sum(map(len, states)) <= MOST_STATE_BYTES
