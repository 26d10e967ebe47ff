"""Partitions move while work is in flight."""

import logging
import threading
from collections import deque
from unittest.mock import Mock
from uuid import UUID

import apache_kafka
import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from pipeline import Pipeline
from standin import StandInEngine

from headrace.schemas import uuid7
from headrace.worker.consumer import TierConsumer, with_defaults
from headrace.worker.errors import ConsumerFailed

TIERS = ("interactive", "standard", "bulk")


def quick() -> StandInEngine:
    return StandInEngine(latency_s=0.1, slots=16)


def send_to_all_partitions(line: Pipeline, count: int) -> set[UUID]:
    ids = set()
    for n in range(count):
        id = uuid7()
        line.send({"job_id": str(id), "prompt": f"prompt {n}"}, TIERS[n % 3], partition=n // 3 % 4)
        ids.add(id)
    line.flush()
    return ids


def test_a_rebalance_is_heard_of_within_a_second_where_the_client_decides() -> None:
    assert with_defaults({}, 100, 1 << 20)["heartbeat.interval.ms"] == 1000
    assert with_defaults({"heartbeat.interval.ms": 400}, 100, 1 << 20)["heartbeat.interval.ms"] == 400
    assert "heartbeat.interval.ms" not in with_defaults({"group.protocol": "consumer"}, 100, 1 << 20)


def test_jobs_are_answered_whatever_strategy_other_clients_of_ours_are_told(line: Pipeline) -> None:
    worker = line.start_worker(quick, kafka={"partition.assignment.strategy": "range"})
    line.submit()
    line.wait_terminal(1)
    worker.close()


def test_a_rebalance_that_cannot_be_carried_out_ends_the_worker_with_the_reason(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TierConsumer, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE, "not now"))

    monkeypatch.setattr(TierConsumer, "_on_assign", refuse)
    worker = line.start_worker(quick)
    with pytest.raises(ConsumerFailed, match="not now"):
        line.wait_for(lambda: False)
    line.workers.remove(worker)


def consumer_of(topic: str, bootstrap: str, protocol: str = "classic") -> TierConsumer:
    """A member of a group of the topic's own name."""
    settings = {"bootstrap.servers": bootstrap, "group.id": topic, "group.protocol": protocol}
    wake = threading.Event()
    return TierConsumer(settings, topic, "bulk", prefetch=10, max_bytes=1000, inbox=deque(), wake=wake)


def test_a_rebalance_that_adds_or_takes_nothing_is_not_told_and_a_worker_without_partitions_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    consumer = consumer_of("jobs", "nowhere")
    broker, partition = Mock(), TopicPartition("jobs", 0)
    consumer._on_assign(broker, [])
    consumer._on_assign(broker, [partition])
    consumer._on_assign(broker, [])
    consumer._on_revoke(broker, [])
    consumer._on_revoke(broker, [partition])
    consumer._on_assign(broker, [])
    nothing = "assigned no partition of jobs"
    assert caplog.messages == [nothing, "assigned jobs[0]", "revoked jobs[0]", nothing]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_without_partitions_leaves_its_group_too(
    line: Pipeline, kafka_kind: str, protocol: str
) -> None:
    if kafka_kind == apache_kafka.TANSU:
        pytest.skip("needs a broker that tells a group's members")
    topic = f"{line.topics.prefix}.single"
    apache_kafka.create_topics(line.bootstrap, [topic], partitions=1)
    members = [consumer_of(topic, line.bootstrap, protocol) for _ in range(2)]
    for member in members:
        member.start()
    admin = AdminClient({"bootstrap.servers": line.bootstrap})

    def group() -> tuple[int, ConsumerGroupState]:
        told = admin.describe_consumer_groups([topic])[topic].result(120)
        return len(told.members), told.state

    line.wait_for(lambda: sorted(member.partitions for member in members) == [0, 1])
    line.wait_for(lambda: group() == (2, ConsumerGroupState.STABLE))
    idle, busy = sorted(members, key=lambda member: member.partitions)
    idle.close(120)
    assert group()[0] == 1
    busy.close(120)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_workers_that_join_and_leave_finish_every_job_once(
    line: Pipeline, kafka_kind: str, protocol: str
) -> None:
    if protocol == "consumer" and kafka_kind == apache_kafka.TANSU:
        pytest.skip("the embedded broker does not know KIP-848")
    first = line.start_worker(quick, group_protocol=protocol, grace_s=60.0)
    ids = send_to_all_partitions(line, 300)
    line.wait_for(lambda: line.states()["succeeded"] > 20)
    second = line.start_worker(quick, group_protocol=protocol, grace_s=60.0)
    line.wait_for(lambda: second.worker.status().partitions == dict.fromkeys(TIERS, 2))
    ids |= send_to_all_partitions(line, 300)
    line.wait_for(lambda: second.engine.seen)
    first.close()
    line.wait_terminal(600)
    line.wait_for(lambda: sum(map(line.lag, TIERS)) == 0)
    second.close()

    assert line.rows() == dict.fromkeys(ids, "succeeded")
    results = line.results(600)
    assert results.keys() == ids
    assert all(copy == copies[0] for copies in results.values() for copy in copies)
    # What the first worker had begun was left to it, not run twice.
    assert len(first.engine.seen) + len(second.engine.seen) == 600
