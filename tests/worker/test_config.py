"""What each Kafka client of a worker is told."""

import logging

import pytest
from confluent_kafka import Producer

from headrace.worker.config import CONSUMER_ONLY, WorkerConfig


def test_what_only_consumers_have_is_kept_from_the_producer() -> None:
    kafka = {"session.timeout.ms": "6000", "security.protocol": "PLAINTEXT", "linger.ms": "7"}
    config = WorkerConfig("127.0.0.1:1", kafka=kafka)
    assert config.consumer("bulk")["session.timeout.ms"] == "6000"
    assert config.producer() == {
        "bootstrap.servers": "127.0.0.1:1",
        "client.id": config.name,
        "reconnect.backoff.ms": 500,
        "security.protocol": "PLAINTEXT",
        "linger.ms": "7",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session.timeout.ms", 6000),
        ("heartbeat.interval.ms", 500),
        ("max.poll.interval.ms", 400_000),
        ("group.instance.id", "a"),
        ("fetch.min.bytes", 2),
        ("max.partition.fetch.bytes", 2_000_000),
        ("auto.offset.reset", "latest"),
        ("enable.auto.commit", False),
        ("isolation.level", "read_uncommitted"),
        ("partition.assignment.strategy", "roundrobin"),
        ("queued.min.messages", 10),
        ("check.crcs", True),
    ],
)
def test_librdkafka_agrees_about_what_only_consumers_have(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert name.startswith(CONSUMER_ONLY)
    config = WorkerConfig("127.0.0.1:1", kafka={name: value})
    producer = Producer(config.producer(), logger=logging.getLogger("librdkafka"))
    producer.poll(0.05)
    assert "CONFWARN" not in caplog.text
