"""Kafka out: results and dead letters, through an idempotent producer.

A record counts as published when the broker has confirmed it. While Kafka is away records wait here, also past the
producer's own message timeout; what may wait is bounded because the worker begins nothing more beyond
``unconfirmed_bytes``, and because the consumers pause on unreleased records.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.ledger.kafka_log import callbacks

log = logging.getLogger(__name__)

AGAIN_AFTER_S = 1.0

# The broker will never take this record. The job table has the result, and says so where it has not.
NEVER_TAKEN = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD})

Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True, eq=False, slots=True)
class Publication:
    """One record to publish; ``about`` comes back when it is confirmed."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    about: Any

    @property
    def size(self) -> int:
        """Bytes it keeps in memory, its value's alone."""
        return len(self.value or b"")


class Publisher:
    """Publishes until confirmed. Used by one thread; never blocks but in ``flush``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {
            "linger.ms": 5,
            "compression.type": "lz4",
            "message.timeout.ms": 60_000,
            "queue.buffering.max.kbytes": 64
            * 1024,  # it keeps a copy of each record; by default up to a gigabyte
            **settings,
            "enable.idempotence": True,
            "acks": "all",
        }
        self._producer = Producer(self._settings, **callbacks(self._settings["bootstrap.servers"]))
        self._waiting: deque[Publication] = deque()
        self._sent: set[Publication] = set()
        self._confirmed: list[Publication] = []
        self.unconfirmed_bytes = 0
        self._again_at = 0.0
        self._broken = False

    def put(self, publication: Publication) -> None:
        """Publish this, and say so in ``confirmed``."""
        self._waiting.append(publication)
        self.unconfirmed_bytes += publication.size

    def confirmed(self) -> list[Publication]:
        """Send what waits, and return what has been confirmed since the last call."""
        if self._broken:
            self._renew()
        if time.monotonic() >= self._again_at:
            self._send()
        self._producer.poll(0)
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    @property
    def unconfirmed(self) -> int:
        """Records handed over and not confirmed."""
        return len(self._waiting) + len(self._sent)

    def close(self) -> None:
        """Forget what is not confirmed: its offset is not committed, so it comes again."""
        self._producer.purge()
        self._producer.poll(0)

    def _send(self) -> None:
        for _ in range(len(self._waiting)):  # each once: what is refused at once must not be asked for ever
            publication = self._waiting.popleft()
            self._sent.add(publication)
            try:
                self._producer.produce(
                    publication.topic,
                    key=publication.key,
                    value=publication.value,
                    headers=publication.headers,
                    on_delivery=partial(self._delivered, publication),
                )
            except BufferError:  # librdkafka's queue is full
                self._sent.discard(publication)
                self._waiting.appendleft(publication)
                return
            except KafkaException as error:
                self._refused(publication, error.args[0])

    def _delivered(self, publication: Publication, error: KafkaError | None, _: Message) -> None:
        if publication not in self._sent:
            return  # of a producer that was replaced
        if error is None:
            self._confirm(publication)
        else:
            self._refused(publication, error)

    def _confirm(self, publication: Publication) -> None:
        self._sent.discard(publication)
        self._confirmed.append(publication)
        self.unconfirmed_bytes -= publication.size

    def _refused(self, publication: Publication, error: KafkaError) -> None:
        if error.code() in NEVER_TAKEN:
            log.error("%s does not take record %s: %s", publication.topic, publication.key, error)
            self._confirm(publication)
            return
        if time.monotonic() >= self._again_at:  # the first of many that fail together
            log.warning("publishing on %s failed, trying again: %s", publication.topic, error)
        self._broken = self._broken or error.fatal() or error.code() == KafkaError._FATAL
        self._again_at = time.monotonic() + AGAIN_AFTER_S
        self._sent.discard(publication)
        self._waiting.append(publication)  # behind the others: one topic that is missing holds up no other

    def _renew(self) -> None:
        """Replace a producer that the broker has fenced; what it had not confirmed is sent anew."""
        log.warning("replacing the producer")
        self._waiting.extendleft(self._sent)
        self._sent.clear()
        self._producer = Producer(self._settings, **callbacks(self._settings["bootstrap.servers"]))
        self._broken = False
