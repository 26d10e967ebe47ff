"""The commands in docs/messages.md, run as they stand with Kafka's own console producer."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from uuid import uuid4

import apache_kafka
import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from headrace.schemas import BatchClosed, Source, Topics, parse_control, parse_job

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1]


def run(script: str, bootstrap: str, topics: Topics, directory: Path) -> None:
    """Run ``script`` in ``directory``, against this broker and these topics."""
    command = apache_kafka.console_producer(bootstrap, "unused")
    if command is None:
        pytest.skip("the console producer comes with Apache Kafka's jars, which could not be resolved")
    tool = directory / "kafka-console-producer.sh"
    tool.write_text(f'#!/bin/sh\nexec {shlex.join(command[: command.index("--bootstrap-server")])} "$@"\n')
    tool.chmod(0o755)
    script = script.replace("localhost:9092", bootstrap).replace(" headrace.", f" {topics.prefix}.")
    path = f"{directory}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-ec", script], cwd=directory, env={**os.environ, "PATH": path}, check=True, timeout=240
    )


def read(bootstrap: str, topic: str, count: int) -> list[Message]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": str(uuid4()), "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, timeout=120) + consumer.consume(1, timeout=0.2)
    consumer.close()
    return messages


def source(message: Message) -> Source:
    return Source(message.topic() or "", 0, message.offset() or 0, message.timestamp()[1])


@pytest.fixture
def topics(kafka: str) -> Topics:
    topics = Topics(prefix=f"docs-{uuid4().hex[:8]}")
    apache_kafka.create_topics(kafka, topics.all, partitions=1)
    return topics


def test_one_job_from_the_console(kafka: str, topics: Topics, tmp_path: Path) -> None:
    run(example("console job"), kafka, topics, tmp_path)
    (message,) = read(kafka, topics.jobs("standard"), 1)
    job = parse_job(message.value(), message.headers(), source(message))
    assert (job.custom_id, job.batch_id, job.sampling.max_tokens) == ("q-1", "demo", 16)


def test_a_batch_from_the_console(kafka: str, topics: Topics, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "tab\\there, and: colons"}\n\n{"prompt": "two"}\n')
    run(example("console batch"), kafka, topics, tmp_path)
    messages = read(kafka, topics.jobs("bulk"), 2)
    jobs = [parse_job(message.value(), message.headers(), source(message)) for message in messages]
    assert [(job.prompt, job.batch_id) for job in jobs] == [
        ("tab\there, and: colons", "demo"),
        ("two", "demo"),
    ]
    (control,) = read(kafka, topics.control, 1)
    closed = parse_control(control.value())
    assert isinstance(closed, BatchClosed)
    assert (closed.batch_id, closed.expected) == ("demo", 2)
