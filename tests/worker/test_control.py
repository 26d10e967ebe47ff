"""What was cancelled lately is remembered, within bounds."""

import threading
from collections import deque
from typing import Any

import apache_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from pipeline import Pipeline

from headrace.schemas import CancelBatch, CancelJob, ControlMessage, uuid7
from headrace.worker import WorkerConfig, control
from headrace.worker.control import Cancel, Cancels, ControlConsumer


def test_a_cancel_covers_its_job_or_its_batch_and_no_other_tenants() -> None:
    cancels, job = Cancels(), uuid7()
    cancels.add(CancelJob(tenant="acme", id=job))
    cancels.add(CancelBatch(tenant="acme", batch_id="b"))
    assert cancels.cover(job, "acme", None)
    assert not cancels.cover(job, "other", None)
    assert cancels.cover(uuid7(), "acme", "b")
    assert not cancels.cover(uuid7(), "other", "b")
    assert not cancels.cover(uuid7(), "acme", None)


def test_only_the_newest_cancels_are_kept() -> None:
    cancels = Cancels(most=2)
    jobs = [uuid7() for _ in range(3)]
    for job in jobs[:2]:
        cancels.add(CancelJob(id=job))
    cancels.add(CancelJob(id=jobs[0]))  # again: newer than the second now
    cancels.add(CancelJob(id=jobs[2]))
    assert [cancels.cover(job, "default", None) for job in jobs] == [True, False, True]


class _Message:
    def error(self) -> None: ...
    def value(self) -> bytes:
        return b""

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7


def test_a_message_that_a_defect_of_ours_cannot_read_costs_no_later_cancel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inbox: deque[Cancel] = deque()
    consumer = ControlConsumer({}, "control", inbox, threading.Event())
    answers: list[Any] = [RecursionError("a secret"), CancelJob(id=uuid7())]

    def parse(_: bytes) -> ControlMessage:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr(control, "parse_control", parse)
    consumer._receive(_Message())  # type: ignore[arg-type]
    consumer._receive(_Message())  # type: ignore[arg-type]
    assert len(inbox) == 1
    assert "control[0] at 7: RecursionError" in caplog.text
    assert "secret" not in caplog.text


def test_a_cancel_on_a_partition_that_the_topic_was_given_later_is_seen(
    line: Pipeline, kafka_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kafka_kind == apache_kafka.TANSU:
        pytest.skip("needs a broker that gives a topic more partitions")
    monkeypatch.setattr(control, "LOOK_FOR_PARTITIONS_S", 0.2)
    inbox: deque[Cancel] = deque()
    settings = WorkerConfig(line.bootstrap, line.topics).control()
    consumer = ControlConsumer(settings, line.topics.control, inbox, threading.Event())
    consumer.start()
    assert consumer.wait_until_caught_up(120)

    def cancel(partition: int) -> CancelJob:
        message = CancelJob(id=uuid7())
        key, value, headers = message.encode()
        line.producer.produce(line.topics.control, key=key, value=value, headers=headers, partition=partition)
        return message

    def partitions_are_known() -> bool:  # to the producer, which only then takes records for them
        topic = line.topics.control
        return len(line.producer.list_topics(topic, 60).topics[topic].partitions) == 6

    try:
        before = cancel(0)
        line.wait_for(lambda: list(inbox) == [before])
        admin = AdminClient({"bootstrap.servers": line.bootstrap})
        admin.create_partitions([NewPartitions(line.topics.control, 6)])[line.topics.control].result(120)
        line.wait_for(partitions_are_known)
        after = [cancel(5), cancel(0)]
        line.flush()
        line.wait_for(lambda: len(inbox) == 3)
        assert {each.key for each in inbox if isinstance(each, CancelJob)} == {
            each.key for each in (before, *after)
        }
    finally:
        consumer.close(10)
