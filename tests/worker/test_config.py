"""What a worker is told, and what it tells each Kafka client."""

import pytest
from confluent_kafka import Consumer

from headrace.ledger import recorder
from headrace.worker.config import WorkerConfig
from headrace.worker.consumer import with_defaults


def test_each_client_is_told_what_its_kind_may_have() -> None:
    kafka = {"session.timeout.ms": "6000", "security.protocol": "PLAINTEXT", "linger.ms": "7"}
    config = WorkerConfig("127.0.0.1:1", kafka=kafka)
    for consumer in (config.consumer("bulk"), config.control()):
        assert consumer["session.timeout.ms"] == "6000"
        assert "linger.ms" not in consumer
    assert config.producer() == {
        "bootstrap.servers": "127.0.0.1:1",
        "client.id": config.name,
        "reconnect.backoff.ms": 500,
        "message.max.bytes": 20_000_000,
        "batch.size": 900_000,
        "security.protocol": "PLAINTEXT",
        "linger.ms": "7",
    }


def test_no_property_puts_all_in_one_group_or_lets_a_new_group_begin_behind_the_oldest_job() -> None:
    kafka = {"group.id": "mine", "auto.offset.reset": "latest"}
    config = WorkerConfig("127.0.0.1:1", kafka=kafka)
    of_worker = with_defaults(config.consumer("bulk"), prefetch=1, max_bytes=1)
    of_recorder = recorder.with_defaults(kafka, config.topics.recorder_group)
    assert of_worker["group.id"] == "headrace.workers.default.bulk"
    assert of_recorder["group.id"] == config.topics.recorder_group
    assert of_worker["auto.offset.reset"] == of_recorder["auto.offset.reset"] == "earliest"


@pytest.mark.parametrize(
    ("slots", "expected"), [(1, 256), (64, 256), (227, 256), (256, 288), (2048, 2304), (65_536, 73_728)]
)
def test_an_engine_has_an_eighth_more_jobs_than_slots_and_256_at_least(slots: int, expected: int) -> None:
    assert WorkerConfig("127.0.0.1:9").in_flight(slots) == expected


def test_a_tier_may_keep_a_quarter_of_a_mebibyte_for_each_job_in_flight() -> None:
    assert WorkerConfig("127.0.0.1:9").held_bytes(256) == 64 * 2**20
    assert WorkerConfig("127.0.0.1:9", max_held_bytes=1000).held_bytes(2304) == 1000


def test_a_consumer_takes_what_the_largest_setting_makes_of_its_queues() -> None:
    config = WorkerConfig("127.0.0.1:1", max_in_flight=1_000_000)
    prefetch, held_bytes = config.tiers[0].holds(1_000_000), config.held_bytes(1_000_000)
    settings = with_defaults(config.consumer("bulk"), prefetch, held_bytes)
    Consumer({**settings, "log_level": 0}).close()


def test_who_says_how_many_jobs_are_in_flight_gets_that_many() -> None:
    assert WorkerConfig("127.0.0.1:9", max_in_flight=7).in_flight(2048) == 7
