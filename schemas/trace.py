"""The W3C trace context that travels with a job and goes on with its result."""

import re
from collections.abc import Iterable

from headrace.schemas.topics import TRACEPARENT, TRACESTATE

# version-trace-parent-flags. Later versions may append fields; ff is no version, and ids of zeros are none.
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(
    rb"(?!ff)(?:00|(?!00)([0-9a-f]{2}))-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?(1)(?:-.*)?)"
)


def trace_of(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes]]:
    """The headers that continue a record's trace; none of them where its traceparent is malformed or there twice."""
    headers = list(headers)
    parents = [value for name, value in headers if name == TRACEPARENT and value is not None]
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0]):
        return []
    states = [(name, value) for name, value in headers if name == TRACESTATE and value]
    return [(TRACEPARENT, parents[0]), *states]
