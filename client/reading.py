"""Reading whole topics: every partition, in no group's rota, committing nothing and disturbing nobody."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from headrace.client.errors import BrokerUnreachable, TopicMissing
from headrace.client.heard import Heard
from headrace.schemas.kafka_properties import for_consumer

PATIENCE_S = 15.0


def properties(kafka: Mapping[str, Any], heard: Heard, group: str) -> dict[str, Any]:
    """What a consumer is made with whose partitions are assigned by hand; it never joins ``group``."""
    return {
        "auto.offset.reset": "earliest",
        "logger": heard,
        **for_consumer(kafka),
        "group.id": group,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
    }


def partitions(consumer: Consumer, topic: str) -> list[TopicPartition]:
    """Every partition, from its beginning. Raises TopicMissing."""
    known = consumer.list_topics(topic, timeout=PATIENCE_S).topics.get(topic)
    if known is None or not known.partitions:
        raise TopicMissing(f"topic {topic} does not exist; `headrace topics create` makes it")
    return [TopicPartition(topic, number, OFFSET_BEGINNING) for number in known.partitions]


def next_messages(consumer: Consumer) -> list[Message]:
    """The records at hand, waiting a moment for the first (consume alone would wait for as many as it is asked)."""
    first = consumer.poll(0.2)
    return [] if first is None else [first, *consumer.consume(500, timeout=0)]


def raise_if_final(error: KafkaError) -> None:
    """Raise for what no waiting mends."""
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise TopicMissing(error.str())
    if error.fatal():
        raise BrokerUnreachable(error.str())
