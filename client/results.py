"""Following a batch with nothing but Kafka: its results, and the word that there are no more."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from headrace.client.errors import BrokerUnreachable, TopicMissing
from headrace.client.heard import Heard
from headrace.schemas import (
    BatchClosed,
    BatchOpened,
    JobResult,
    Topics,
    Unparsable,
    UnreadableResult,
    dead_letter_source,
    parse_control,
)
from headrace.schemas import topics as names
from headrace.schemas.errors import ErrorCode, Outcome
from headrace.schemas.kafka_headers import headers_of
from headrace.schemas.kafka_properties import for_consumer

# Clocks differ: a worker's first result may bear an earlier time than the batch's opening.
_MARGIN_MS = int(timedelta(minutes=5).total_seconds() * 1000)
_PATIENCE_S = 15.0
_REJECTING = {code.value.encode() for code in ErrorCode if code.outcome is Outcome.REJECTED}


class Follower:
    """Reads three topics side by side: results, dead letters (records that never became jobs) and control messages.

    It belongs to no consumer group's rota: it reads every partition, commits nothing, and disturbs nobody.
    """

    def __init__(self, kafka: Mapping[str, Any], topics: Topics, tenant: str, batch_id: str) -> None:
        self._heard = Heard()
        self._config = {
            "auto.offset.reset": "earliest",
            "logger": self._heard,
            **for_consumer(kafka),
            "group.id": f"headrace-follow-{uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": False,
        }
        self._topics = topics
        self._tenant = tenant
        self._batch_id = batch_id
        self._expected: int | None = None
        self._opened_ms: int | None = None
        self._runs: set[tuple[UUID, int]] = set()
        self._ids: set[UUID] = set()
        self._rejected: set[tuple[str, int, int]] = set()

    def results(self, idle_timeout: float | None) -> Iterator[JobResult]:
        """New results until the batch is complete, or none came for ``idle_timeout`` seconds."""
        # Two consumers, one after the other: a broker answers a connection in turn, so that any question to it waits
        # half a second behind a fetch that finds nothing.
        with closing(Consumer(self._config)) as consumer, self._heard.explaining(consumer):
            control = self._read_control(consumer)
        with closing(Consumer(self._config)) as consumer:
            with self._heard.explaining(consumer):
                consumer.assign(control + self._ended_since_opening(consumer))
            heard = monotonic()
            while not self._complete and (idle_timeout is None or monotonic() - heard < idle_timeout):
                for message in _next(consumer):
                    result = self._take(message)
                    if result is not None:
                        heard = monotonic()
                        yield result

    @property
    def _complete(self) -> bool:
        return self._expected is not None and len(self._ids) + len(self._rejected) >= self._expected

    def _read_control(self, consumer: Consumer) -> list[TopicPartition]:
        """Read all control messages that there are; returns where to go on."""
        positions = {}
        for partition in _partitions(consumer, self._topics.control):
            low, high = consumer.get_watermark_offsets(partition, timeout=_PATIENCE_S)
            positions[partition.partition] = (low, high)
        unread = {number for number, (low, high) in positions.items() if low < high}
        topic = self._topics.control
        consumer.assign([TopicPartition(topic, number, positions[number][0]) for number in unread])
        while unread:
            for message in _next(consumer):
                self._take(message)
            for position in consumer.position([TopicPartition(topic, number) for number in unread]):
                if position.offset >= positions[position.partition][1]:
                    unread.discard(position.partition)
        return [TopicPartition(topic, number, high) for number, (_, high) in positions.items()]

    def _ended_since_opening(self, consumer: Consumer) -> list[TopicPartition]:
        """Where results and dead letters of the batch may begin."""
        partitions = [
            *_partitions(consumer, self._topics.results),
            *_partitions(consumer, self._topics.dead),
        ]
        if self._opened_ms is None:
            return [TopicPartition(at.topic, at.partition, 0) for at in partitions]
        since = max(self._opened_ms - _MARGIN_MS, 0)
        # Ends first: a record that comes between the two questions must not fall through.
        ends = {
            (at.topic, at.partition): consumer.get_watermark_offsets(at, timeout=_PATIENCE_S)[1]
            for at in partitions
        }
        wanted = [TopicPartition(at.topic, at.partition, since) for at in partitions]
        found = consumer.offsets_for_times(wanted, timeout=_PATIENCE_S)
        return [
            TopicPartition(
                at.topic, at.partition, at.offset if at.offset >= 0 else ends[at.topic, at.partition]
            )
            for at in found
        ]

    def _take(self, message: Message) -> JobResult | None:
        """Note what a record says of the batch; the result in it, if it is one and new."""
        error = message.error()
        if error is not None:
            _raise_if_final(error)
            return None
        if message.topic() == self._topics.control:
            self._take_control(message)
        elif self._is_ours(message):
            if message.topic() == self._topics.results:
                return self._take_result(message)
            self._take_dead_letter(message)
        return None

    def _take_control(self, message: Message) -> None:
        try:
            control = parse_control(message.value())
        except Unparsable:
            return
        if not isinstance(control, BatchOpened | BatchClosed):
            return
        if (control.tenant, control.batch_id) != (self._tenant, self._batch_id):
            return
        if isinstance(control, BatchClosed):
            self._expected = max(self._expected or 0, control.expected)  # a file that grew was sent again
        elif self._opened_ms is None:
            self._opened_ms = message.timestamp()[1]

    def _take_result(self, message: Message) -> JobResult | None:
        try:
            result = JobResult.decode(message.value() or b"")
        except UnreadableResult:
            return None
        if (result.id, result.run) in self._runs:
            return None
        self._runs.add((result.id, result.run))
        self._ids.add(result.id)
        return result

    def _take_dead_letter(self, message: Message) -> None:
        """A letter may be there twice, so what counts is where its record came from."""
        headers = headers_of(message)
        if dict(headers).get(names.DEAD_CODE) in _REJECTING:
            source = dead_letter_source(headers)
            letter = str(message.topic()), int(message.partition() or 0), int(message.offset() or 0)
            self._rejected.add((source.topic, source.partition, source.offset) if source else letter)

    def _is_ours(self, message: Message) -> bool:
        headers = dict(headers_of(message))
        batch_id, tenant = headers.get(names.BATCH_ID), headers.get(names.TENANT, b"default")
        return (tenant, batch_id) == (self._tenant.encode(), self._batch_id.encode())


def _next(consumer: Consumer) -> list[Message]:
    """The records at hand, waiting a moment for the first (consume alone would wait for as many as it is asked)."""
    first = consumer.poll(0.2)
    return [] if first is None else [first, *consumer.consume(500, timeout=0)]


def _partitions(consumer: Consumer, topic: str) -> list[TopicPartition]:
    known = consumer.list_topics(topic, timeout=_PATIENCE_S).topics.get(topic)
    if known is None or not known.partitions:
        raise TopicMissing(f"topic {topic} does not exist; `headrace topics create` makes it")
    return [TopicPartition(topic, number) for number in known.partitions]


def _raise_if_final(error: KafkaError) -> None:
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise TopicMissing(error.str())
    if error.fatal():
        raise BrokerUnreachable(error.str())
