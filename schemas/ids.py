"""How a job gets its one key, ``id``: a UUID that every reader of the same record works out alike.

A UUIDv7 in ``job_id`` is the id. Any other ``job_id`` maps to ``ff`` and a hash of (tenant, job_id), and so does an
``idempotency_key`` where there is no ``job_id``. A job with neither takes an id in UUIDv7's layout, made of the
record's timestamp and a hash of its place in Kafka, so that a replay gives the same one. Ids of UUIDv7's layout sort
by time, which is what the job table's day partitions need; ``ff`` ids, of version 8, sort after all of them.
"""

import os
import re
import time
from hashlib import sha256
from typing import NamedTuple
from uuid import UUID

DAY_MS = 86_400_000

# A UUIDv7 may be this much older or newer than its record: the job table has (or will have) a partition there.
MAX_AGE_MS = 30 * DAY_MS
MAX_AHEAD_MS = DAY_MS

_UUID7 = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII
)
_HASHED = re.compile(
    r"ff[0-9a-f]{6}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII
)
_MAX_UUID7_MS = (1 << 48) - 1
_VERSION_AND_VARIANT = 0xF << 76 | 0x3 << 62


class Source(NamedTuple):
    """Where a record lies in Kafka.

    timestamp_ms: the record's timestamp, milliseconds since the epoch (-1: none). topic_id: the topic's own UUID, where
    the reader knows it; a topic that is deleted and made again then does not repeat ids. All readers of one topic must
    agree on whether they give it. run: which run of its job the record asks for; more than 1 where it was sent again.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    topic_id: str | None = None
    run: int = 1


def job_key(tenant: str, job_id: str | None, source: Source, idempotency_key: str | None = None) -> UUID:
    """The id of the job that ``source`` holds."""
    if job_id is not None:
        return named_key(tenant, job_id)
    if idempotency_key is not None:
        return _ff(b"idempotency", tenant, idempotency_key)
    place = f"{source.topic_id or source.topic}/{source.partition}/{source.offset}"
    return uuid7(source.timestamp_ms, sha256(place.encode()).digest()[:10])


def named_key(tenant: str, job_id: str) -> UUID:
    """The id of a job that names itself: the ``job_id``, if it is a UUIDv7, else ``ff`` and a hash."""
    return UUID(job_id) if _UUID7.fullmatch(job_id) else _ff(b"job", tenant, job_id)


def key_meant(tenant: str, name: str) -> UUID:
    """The id of the job that a person means by ``name``: an id as Headrace prints it, or the job's ``job_id``."""
    return UUID(name) if _HASHED.fullmatch(name) else named_key(tenant, name)


def uuid7(timestamp_ms: int | None = None, entropy: bytes | None = None) -> UUID:
    """A UUID of version 7 (RFC 9562): 48 bits of time, then 74 of the 80 bits of ``entropy`` (default: random ones)."""
    milliseconds = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
    bits = int.from_bytes(os.urandom(10) if entropy is None else entropy, "big")
    high = min(max(milliseconds, 0), _MAX_UUID7_MS) << 16 | 0x7000 | bits >> 68
    return UUID(int=high << 64 | 0x8 << 60 | bits & (1 << 62) - 1)


def time_ms(key: UUID) -> int | None:
    """The time in an id of UUIDv7's layout, milliseconds since the epoch; None for any other id."""
    return key.int >> 80 if key.version == 7 else None


def out_of_range(key: UUID, source: Source) -> bool:
    """Whether a UUIDv7 lies so far from its record's time that the job table has no day for it.

    Measured against the record, not against the clock, so that a replay decides alike.
    """
    made = time_ms(key)
    if made is None or source.timestamp_ms < 0:
        return False
    return not -MAX_AGE_MS <= made - source.timestamp_ms <= MAX_AHEAD_MS


def _ff(kind: bytes, tenant: str, name: str) -> UUID:
    # Lengths keep ("ab", "c") and ("a", "bc") apart. surrogatepass: an odd name still has an id to fail under.
    parts = [kind, *(text.encode("utf-8", "surrogatepass") for text in (tenant, name))]
    digest = sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()
    bits = int.from_bytes(b"\xff" + digest[:15], "big")
    # Version 8 (RFC 9562: made as its maker likes), or one in 64 hashes would pass for a UUIDv7.
    return UUID(int=bits & ~_VERSION_AND_VARIANT | 8 << 76 | 2 << 62)
