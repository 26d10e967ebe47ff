"""Reading records back from where they lie, and whole topics to their end."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from headrace.client.errors import BrokerUnreachable, TopicMissing
from headrace.client.heard import Heard
from headrace.client.reading import properties

Place = tuple[str, int, int]
"""Topic, partition, offset."""

_PATIENCE_S = 20.0
# A partition between two leaders, or just made.
_SOON_OVER = frozenset({KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION})
# What Kafka's numbers hold: librdkafka takes no larger ones.
_LAST_PARTITION = 2**31 - 1
_LAST_OFFSET = 2**63 - 1
_JUMP = 2000  # records between two wanted ones beyond which a seek is quicker than reading on


def read_back(kafka: Mapping[str, Any], places: Iterable[Place]) -> Iterator[Message]:
    """The records at these places, by partition and offset. Those that are not there (any more) are left out.

    kafka: librdkafka's properties, ``bootstrap.servers`` among them. Raises BrokerUnreachable.
    """
    wanted: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for topic, partition, offset in places:
        if partition <= _LAST_PARTITION and offset <= _LAST_OFFSET:
            wanted[topic, partition].add(offset)
    heard = Heard()
    with closing(_consumer(kafka, heard)) as consumer, heard.explaining(consumer):
        for (topic, partition), offsets in sorted(wanted.items()):
            yield from _read_partition(consumer, TopicPartition(topic, partition), sorted(offsets))


def place_of(message: Message) -> Place:
    """Where a record lies that came from a broker."""
    return str(message.topic()), int(message.partition() or 0), int(message.offset() or 0)


def read_all(kafka: Mapping[str, Any], topic: str) -> Iterator[Message]:
    """Every record of a topic up to its present end, partition by partition. Raises BrokerUnreachable, TopicMissing."""
    heard = Heard()
    with (
        closing(_consumer({**kafka, "auto.offset.reset": "earliest"}, heard)) as consumer,
        heard.explaining(consumer),
    ):
        known = consumer.list_topics(topic, timeout=_PATIENCE_S).topics[topic]
        if known.error is not None:
            raise TopicMissing(f"topic {topic} does not exist; `headrace topics create` makes it")
        for partition in sorted(known.partitions):
            consumer.assign([TopicPartition(topic, partition, 0)])
            while (message := _next(consumer)) is not None:
                yield message


def _read_partition(consumer: Consumer, at: TopicPartition, offsets: list[int]) -> Iterator[Message]:
    first, known = _bounds(consumer, at)
    left = deque(offset for offset in offsets if offset >= first)
    if known is None or not left:
        return
    consumer.assign([TopicPartition(at.topic, at.partition, min(left[0], known))])
    while left and (message := _next(consumer)) is not None:
        here: int = message.offset()
        while left and left[0] < here:  # compacted away
            left.popleft()
        if left and left[0] == here:
            left.popleft()
            yield message
        if left and min(left[0], known) - here > _JUMP:
            consumer.seek(TopicPartition(at.topic, at.partition, min(left[0], known)))


def _bounds(consumer: Consumer, at: TopicPartition) -> tuple[int, int | None]:
    """The oldest offset kept, and the newest that may be read from; None where there is no such partition.

    A broker need not answer who reads from beyond the end of a partition, so what may lie there is read on to. And it may
    lie there: the embedded broker takes a last batch of many records for one when it is asked for the end.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            first, end = consumer.get_watermark_offsets(at, timeout=_PATIENCE_S)
            return first, max(first, end - 1)
        except KafkaException as error:
            cause = error.args[0]
            if cause.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                return 0, None
            if cause.code() not in _SOON_OVER or time.monotonic() > until:
                raise
        time.sleep(0.1)


def _next(consumer: Consumer) -> Message | None:
    """The next record; None at the end of the partition, and beyond it."""
    message = consumer.poll(_PATIENCE_S)
    if message is None:
        raise BrokerUnreachable(f"Kafka has sent nothing for {_PATIENCE_S:g} s")
    error = message.error()
    if error is None:
        return message
    if error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET):
        return None
    raise BrokerUnreachable(error.str())


def _consumer(kafka: Mapping[str, Any], heard: Heard) -> Consumer:
    """A consumer of no group: it is assigned by hand and commits nothing."""
    return Consumer(
        properties({"auto.offset.reset": "error", **kafka}, heard, f"headrace-readback-{uuid4()}")
    )
