"""What a batch's producer has said of it on the control topic."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from time import monotonic
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from headrace.client.errors import BrokerUnreachable
from headrace.client.heard import Heard
from headrace.client.reading import PATIENCE_S, next_messages, partitions, properties, raise_if_final
from headrace.schemas import BatchClosed, BatchOpened, Topics, Unparsable, parse_control


class Announced:
    """A batch, as far as the control messages taken in tell of it.

    expected: how many records it has; of several counts the largest, since a file that grew is sent again. None until it
    is closed. submission: the sending that this count is of, the latest with a name where several have the same; None where
    none has. opened_ms: the time of the message that opened it. The job table's rule is the same.
    """

    def __init__(self, tenant: str, batch_id: str) -> None:
        self._address = tenant, batch_id
        self.expected: int | None = None
        self.submission: str | None = None
        self.opened_ms: int | None = None

    def read(self, consumer: Consumer, starts: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Take in all that there is from ``starts`` on; returns where to go on. Raises BrokerUnreachable, TopicMissing."""
        consumer.assign(starts)
        ends: dict[int, TopicPartition] = {}
        heard = monotonic()
        while len(ends) < len(starts):
            for message in next_messages(consumer):
                heard = monotonic()
                error = message.error()
                if error is None:
                    self.take(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    ends[message.partition()] = TopicPartition(
                        message.topic(), message.partition(), message.offset()
                    )
                else:
                    raise_if_final(error)
            if monotonic() - heard > PATIENCE_S:
                raise BrokerUnreachable(f"Kafka has sent nothing for {PATIENCE_S:g} s")
        return list(ends.values())

    def take(self, message: Message) -> None:
        """Take in one record of the control topic."""
        try:
            control = parse_control(message.value())
        except Unparsable:
            return
        if not isinstance(control, BatchOpened | BatchClosed):
            return
        if (control.tenant, control.batch_id) != self._address:
            return
        if isinstance(control, BatchClosed):
            if self.expected is None or _rank(control) >= (self.expected, self.submission is not None):
                self.expected, self.submission = control.expected, control.submission
        elif self.opened_ms is None:
            self.opened_ms = message.timestamp()[1]

    def supersedes(self, expected: int | None, submission: str | None) -> bool:
        """Whether a batch closed with that count, of that sending, is closed otherwise once all of this is recorded."""
        if self.expected is None or expected is None:
            return self.expected is not None
        named = self.submission is not None and self.submission != submission
        return self.expected > expected or (self.expected == expected and named)


def _rank(closed: BatchClosed) -> tuple[int, bool]:
    return closed.expected, closed.submission is not None


def not_recorded(kafka: Mapping[str, Any], topics: Topics, tenant: str, batch_id: str) -> Announced:
    """What is said of the batch in messages that the recorder has not confirmed yet: the job table may not know it.

    kafka: librdkafka's properties, ``bootstrap.servers`` among them. Raises BrokerUnreachable, TopicMissing.
    """
    heard, announced = Heard(), Announced(tenant, batch_id)
    with (
        closing(Consumer(properties(kafka, heard, topics.recorder_group))) as consumer,
        heard.explaining(consumer),
    ):
        confirmed = consumer.committed(partitions(consumer, topics.control), timeout=PATIENCE_S)
        announced.read(consumer, [_or_beginning(at) for at in confirmed])
    return announced


def _or_beginning(at: TopicPartition) -> TopicPartition:
    """Where the recorder will read on, which of a partition that it never read is the beginning."""
    return TopicPartition(at.topic, at.partition, at.offset if at.offset >= 0 else OFFSET_BEGINNING)
