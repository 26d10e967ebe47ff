"""Whether a topic is still the one it was: offsets of a topic that was deleted and made again mean other records.

A consumer group knows topics by name alone. Its members keep their positions over such a change, and commit them anew, so
whatever the new topic holds before those would never be read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient, TopicDescription

from headrace.ledger.kafka_log import callbacks
from headrace.schemas.kafka_properties import for_consumer, for_producer

LOOK_EVERY_S = 5.0


class TopicIds:
    """Remembers the ids of topics, as the broker tells them. For one thread; never waits and never raises.

    settings: of a consumer; those of them that every client may have are used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        given = {**for_producer(for_consumer(settings)), **callbacks(settings["bootstrap.servers"])}
        given.pop("on_commit", None)
        self._admin = AdminClient(given)
        self._known: dict[str, str] = {}
        self._asked: dict[str, Future[TopicDescription]] = {}
        self._look_at = 0.0

    def made_anew(self, topics: Collection[str]) -> set[str]:
        """Those topics that have another id than when they were looked at before; each change is told once."""
        if self._asked:
            return self._compare() if all(each.done() for each in self._asked.values()) else set()
        if topics and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._asked = self._admin.describe_topics(TopicCollection(sorted(topics)))
        return set()

    def _compare(self) -> set[str]:
        told = {topic: answer for topic, answer in self._asked.items() if answer.exception() is None}
        ids = {topic: str(answer.result().topic_id) for topic, answer in told.items()}
        changed = {topic for topic, id in ids.items() if self._known.get(topic, id) != id}
        self._known |= ids
        self._asked = {}
        return changed
