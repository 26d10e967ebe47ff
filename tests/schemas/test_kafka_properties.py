"""Which of librdkafka's properties belong to one kind of client alone: librdkafka itself is asked."""

import logging

import pytest
from confluent_kafka import Consumer, Producer

from headrace.schemas.kafka_properties import CONSUMER_ONLY, PRODUCER_ONLY, for_consumer, for_producer

CONSUMERS = {
    "session.timeout.ms": 6000,
    "heartbeat.interval.ms": 500,
    "max.poll.interval.ms": 400_000,
    "group.instance.id": "a",
    "fetch.min.bytes": 2,
    "max.partition.fetch.bytes": 2_000_000,
    "auto.offset.reset": "latest",
    "enable.auto.commit": False,
    "isolation.level": "read_uncommitted",
    "partition.assignment.strategy": "roundrobin",
    "queued.min.messages": 10,
    "check.crcs": True,
}
PRODUCERS = {
    "acks": "all",
    "batch.size": 10_000,
    "compression.type": "lz4",
    "compression.level": 3,
    "delivery.timeout.ms": 7000,
    "enable.idempotence": True,
    "linger.ms": 3,
    "message.send.max.retries": 3,
    "message.timeout.ms": 7000,
    "partitioner": "random",
    "queue.buffering.max.messages": 100,
    "request.timeout.ms": 3000,
    "retries": 3,
    "sticky.partitioning.linger.ms": 3,
    "transaction.timeout.ms": 30_000,
}
EVERYBODYS = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "message.max.bytes": 2_000_000}
log = logging.getLogger("librdkafka")


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_producer_is_not_told_what_only_a_consumer_has(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert name.startswith(CONSUMER_ONLY)
    Producer(for_producer({**EVERYBODYS, name: CONSUMERS[name]}), logger=log).poll(0.05)
    assert "CONFWARN" not in caplog.text


@pytest.mark.parametrize("name", PRODUCERS)
def test_a_consumer_is_not_told_what_only_a_producer_has(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert name.startswith(PRODUCER_ONLY)
    consumer = Consumer(for_consumer({**EVERYBODYS, name: PRODUCERS[name]}), logger=log)
    consumer.poll(0.05)
    consumer.close()
    assert "CONFWARN" not in caplog.text


def test_what_both_may_have_stays_with_both() -> None:
    assert for_producer(EVERYBODYS) == {name: EVERYBODYS[name] for name in EVERYBODYS if name != "group.id"}
    assert for_consumer(EVERYBODYS) == EVERYBODYS
