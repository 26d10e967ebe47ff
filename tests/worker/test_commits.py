"""What a consumer makes of the broker's answers to its commits."""

import threading
from collections import deque

import pytest
from confluent_kafka import KafkaError, TopicPartition

from headrace.worker.consumer import TierConsumer

TOPIC = "jobs"


class Broker:
    """Stands for librdkafka's consumer: takes commits, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.asked += [each.offset for each in offsets]


@pytest.fixture
def consumer() -> TierConsumer:
    made = TierConsumer(
        {"bootstrap.servers": "nowhere", "group.id": "g"},
        TOPIC,
        "standard",
        prefetch=10,
        max_bytes=1000,
        inbox=deque(),
        wake=threading.Event(),
    )
    made.tracker.assign(TOPIC, 0)
    return made


def finish(consumer: TierConsumer, offset: int) -> None:
    assignment = consumer.tracker.deliver(TOPIC, 0, offset)
    assert assignment is not None
    assignment.done(offset)


def answer(consumer: TierConsumer, offset: int, error: KafkaError | None = None) -> None:
    consumer._on_commit(error, [TopicPartition(TOPIC, 0, offset)])


def test_an_offset_is_committed_once(consumer: TierConsumer) -> None:
    broker = Broker()
    finish(consumer, 6)
    for _ in range(3):
        consumer._commit(broker)  # type: ignore[arg-type]
        answer(consumer, 7)
    assert broker.asked == [7]


def test_a_commit_that_failed_is_sent_again(consumer: TierConsumer) -> None:
    broker = Broker()
    finish(consumer, 6)
    consumer._commit(broker)  # type: ignore[arg-type]
    answer(consumer, 7, KafkaError(KafkaError._TIMED_OUT))
    consumer._commit(broker)  # type: ignore[arg-type]
    assert broker.asked == [7, 7]


def test_an_offset_that_an_older_commit_overtook_late_is_committed_again(consumer: TierConsumer) -> None:
    broker = Broker()
    for offset in (6, 7):
        finish(consumer, offset)
        consumer._commit(broker)  # type: ignore[arg-type]
    answer(consumer, 8)
    answer(consumer, 7)  # sent first, and again after its connection was lost: the broker now has 7
    consumer._commit(broker)  # type: ignore[arg-type]
    answer(consumer, 8)
    consumer._commit(broker)  # type: ignore[arg-type]
    assert broker.asked == [7, 8, 8]
