"""librdkafka's properties, sorted by the kind of client that may have them.

One set of properties serves every client of a process. librdkafka warns of those that a client of the other kind is
given, for each client anew, so each kind leaves out what is the other's alone.
"""

from collections.abc import Mapping
from typing import Any

# By how their names begin, as in librdkafka's CONFIGURATION.md.
CONSUMER_ONLY = (
    "allow.auto.create.topics",
    "auto.commit.",
    "auto.offset.reset",
    "check.crcs",
    "consume.callback.",
    "coordinator.query.interval.ms",
    "enable.auto.",
    "enable.partition.eof",
    "fetch.",
    "group.",
    "heartbeat.interval.ms",
    "isolation.level",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "offset.store.",
    "partition.assignment.strategy",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "session.timeout.ms",
)
PRODUCER_ONLY = (
    "acks",
    "batch.",
    "compression.",
    "delivery.",
    "enable.gapless.guarantee",
    "enable.idempotence",
    "linger.ms",
    "message.send.max.retries",
    "message.timeout.ms",
    "partitioner",
    "produce.offset.report",
    "queue.buffering.",
    "queuing.strategy",
    "request.required.acks",
    "request.timeout.ms",
    "retries",
    "sticky.partitioning.",
    "transaction",
)


def for_producer(properties: Mapping[str, Any]) -> dict[str, Any]:
    """``properties`` but for those that only a consumer may have."""
    return {name: value for name, value in properties.items() if not name.startswith(CONSUMER_ONLY)}


def for_consumer(properties: Mapping[str, Any]) -> dict[str, Any]:
    """``properties`` but for those that only a producer may have."""
    return {name: value for name, value in properties.items() if not name.startswith(PRODUCER_ONLY)}
