"""Kafka out: results and dead letters, through an idempotent producer.

A record counts as published when the broker has confirmed it. While Kafka is away records wait here, also past the
producer's own message timeout; what may wait is bounded because the worker begins nothing more beyond
``unconfirmed_bytes``, and because the consumers pause on unreleased records.

A record that the broker never takes must not be waited for, nor vanish: it is published in a smaller form that still
says how the job ended. Kafka refuses whole batches, so what is refused is first sent once more, alone.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.ledger.kafka_log import callbacks

log = logging.getLogger(__name__)

AGAIN_AFTER_S = 1.0

# The broker will never take this record, or one of its batch.
NEVER_TAKEN = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD})

Headers = list[tuple[str, bytes | None]]


class Form(StrEnum):
    """In which form a record was published: but for WHOLE, because Kafka refused the one before it."""

    WHOLE = "whole"
    WITHOUT_TRACE = "without_trace"
    WITHOUT_ANSWER = "without_answer"
    NOT_AT_ALL = "not_at_all"


@dataclass(frozen=True, eq=False, slots=True)
class Publication:
    """One record to publish; ``about`` comes back when it is confirmed.

    smaller: what to publish instead where Kafka finds this too large; None, or an answer of None, for nothing.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    about: Any
    form: Form = Form.WHOLE
    smaller: "Callable[[Publication], Publication | None] | None" = None

    @property
    def size(self) -> int:
        """Bytes it keeps in memory, its value's alone."""
        return len(self.value or b"")


class Publisher:
    """Publishes until confirmed. Used by one thread; never blocks.

    alone: each record is a batch of its own, so that one which is refused is refused for itself.
    """

    def __init__(self, settings: Mapping[str, Any], *, alone: bool = False) -> None:
        self._given = settings
        self._settings = {**with_defaults(settings), **({"batch.num.messages": 1} if alone else {})}
        self._alone = alone
        self._one_by_one: Publisher | None = None  # made when it is needed, which is hardly ever
        self._producer = Producer(self._settings, **callbacks(self._settings["bootstrap.servers"]))
        self._waiting: deque[Publication] = deque()
        self._sent: set[Publication] = set()
        self._confirmed: list[Publication] = []
        self._unconfirmed_bytes = 0
        self._again_at = 0.0
        self._broken = False

    def put(self, publication: Publication) -> None:
        """Publish this, and say so in ``confirmed``."""
        self._waiting.append(publication)
        self._unconfirmed_bytes += publication.size

    def confirmed(self) -> list[Publication]:
        """Send what waits, and return what has been confirmed since the last call, each in the form that Kafka took."""
        if self._broken:
            self._renew()
        if time.monotonic() >= self._again_at:
            self._send()
        self._producer.poll(0)
        confirmed, self._confirmed = self._confirmed, []
        return confirmed if self._one_by_one is None else confirmed + self._one_by_one.confirmed()

    @property
    def unconfirmed(self) -> int:
        """Records handed over and not confirmed."""
        again = 0 if self._one_by_one is None else self._one_by_one.unconfirmed
        return len(self._waiting) + len(self._sent) + again

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes of their values."""
        again = 0 if self._one_by_one is None else self._one_by_one.unconfirmed_bytes
        return self._unconfirmed_bytes + again

    def close(self) -> None:
        """Forget what is not confirmed: its offset is not committed, so it comes again."""
        if self._one_by_one is not None:
            self._one_by_one.close()
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
        self._unconfirmed_bytes -= publication.size

    def _refused(self, publication: Publication, error: KafkaError) -> None:
        if error.code() in NEVER_TAKEN:
            self._sent.discard(publication)
            self._unconfirmed_bytes -= publication.size
            if self._alone:
                self._publish_smaller(publication, error)
            else:
                self._publish_alone(publication)
            return
        if time.monotonic() >= self._again_at:  # the first of many that fail together
            log.warning("publishing on %s failed, trying again: %s", publication.topic, error)
        self._broken = self._broken or error.fatal() or error.code() == KafkaError._FATAL
        self._again_at = time.monotonic() + AGAIN_AFTER_S
        self._sent.discard(publication)
        self._waiting.append(publication)  # behind the others: one topic that is missing holds up no other

    def _publish_alone(self, publication: Publication) -> None:
        if self._one_by_one is None:
            self._one_by_one = Publisher(self._given, alone=True)
        self._one_by_one.put(publication)

    def _publish_smaller(self, publication: Publication, error: KafkaError) -> None:
        smaller = None if publication.smaller is None else publication.smaller(publication)
        if smaller is None:
            log.error("%s does not take record %s: %s", publication.topic, publication.key, error)
            self._confirmed.append(replace(publication, form=Form.NOT_AT_ALL))
            return
        log.warning(
            "%s does not take record %s, publishing it %s: %s",
            publication.topic, publication.key, smaller.form.replace("_", " "), error,
        )  # fmt: skip
        self.put(smaller)

    def _renew(self) -> None:
        """Replace a producer that the broker has fenced; what it had not confirmed is sent anew."""
        log.warning("replacing the producer")
        self._waiting.extendleft(self._sent)
        self._sent.clear()
        self._producer = Producer(self._settings, **callbacks(self._settings["bootstrap.servers"]))
        self._broken = False


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Ours below the user's; what correctness rests on above both."""
    return {
        "linger.ms": 5,
        "compression.type": "lz4",
        "message.timeout.ms": 60_000,
        "queue.buffering.max.kbytes": 64
        * 1024,  # it keeps a copy of each record; by default up to a gigabyte
        **settings,
        "enable.idempotence": True,
        "acks": "all",
    }
