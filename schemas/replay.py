"""Records sent once more: the headers by which a record says which one it repeats, and as which run.

A repeat lies elsewhere than the record it repeats, and an id may be made of a record's place. So it says where the
first one lay, in its own topic, and everybody reads it as if it lay there still: the same id, the same job.
"""

from headrace.schemas import topics
from headrace.schemas.envelope import Headers
from headrace.schemas.ids import Source

_ADDED = frozenset((*topics.REPEAT_HEADERS, *topics.DEAD_HEADERS))
_MAX_INT, _MAX_BIGINT = 2**31 - 1, 2**63 - 1  # what the job table's columns hold


def source_of(headers: Headers, topic: str, partition: int, offset: int, timestamp_ms: int) -> Source:
    """The source of a record that lies here: its own place, or for a repeat that of the record it repeats.

    Headers that make no sense are as if they were not there.
    """
    found = dict(headers or ())
    if topics.REPLAY_OF in found and topics.RUN in found:
        run = _number(found[topics.RUN], _MAX_INT)
        place = (found[topics.REPLAY_OF] or b"").split(b"/")
        numbers = [_number(*part) for part in zip(place, (_MAX_INT, _MAX_BIGINT, _MAX_BIGINT), strict=False)]
        if run is not None and run > 1 and len(place) == 3 and None not in numbers:
            partition, offset, timestamp_ms = (number or 0 for number in numbers)
            return Source(topic, partition, offset, timestamp_ms, run=run)
    return Source(topic, partition, offset, timestamp_ms)


def repeat_headers(headers: Headers, source: Source) -> list[tuple[str, bytes | None]]:
    """A record's headers for sending it once more as ``source.run``; what a dead letter added is left out."""
    place = b"%d/%d/%d" % (source.partition, source.offset, max(source.timestamp_ms, 0))
    kept = [(name, value) for name, value in headers or () if name not in _ADDED]
    return [*kept, (topics.RUN, b"%d" % source.run), (topics.REPLAY_OF, place)]


def dead_letter_source(headers: Headers) -> Source | None:
    """Where the record of a dead letter lay, and the run it died in; None for a record that is no dead letter."""
    found = dict(headers or ())
    topic = found.get(topics.DEAD_TOPIC)
    partition = _number(found.get(topics.DEAD_PARTITION), _MAX_INT)
    offset = _number(found.get(topics.DEAD_OFFSET), _MAX_BIGINT)
    if not topic or partition is None or offset is None:
        return None
    timestamp_ms = _number(found.get(topics.DEAD_TIMESTAMP), _MAX_BIGINT)
    run = _number(found.get(topics.DEAD_RUN), _MAX_INT - 1) or 1
    at = -1 if timestamp_ms is None else timestamp_ms
    return Source(topic.decode("utf-8", "replace"), partition, offset, at, run=run)


def _number(digits: bytes | None, most: int) -> int | None:
    if not digits or len(digits) > 19 or not digits.isdigit():
        return None
    return number if (number := int(digits)) <= most else None
