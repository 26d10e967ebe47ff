"""A producer that waits when its buffer is full, and knows which records did not arrive."""

import time
from collections.abc import Collection, Mapping, Sequence
from threading import Thread
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.client.errors import BrokerUnreachable, DeliveryFailed, TopicMissing
from headrace.client.heard import Heard
from headrace.schemas.kafka_properties import for_producer

_KEYS_TOLD = 10  # of records that did not arrive
_PATIENCE_S = 10.0
_DROPPED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
_NEW_TOPIC_S = 1.0  # a topic just made is not known to every broker at once


class Outbox:
    """Sends records to Kafka: idempotent, acknowledged by all replicas, with bounded memory. For one thread."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._heard = Heard()
        self._producer = Producer({"logger": self._heard, **with_defaults(config)})
        self.confirmed = 0  # records that Kafka has, as it said
        self._failed_keys: list[str] = []
        self._failures = 0
        self._reason = ""

    def require(self, topics: Collection[str]) -> None:
        """Make sure that these topics exist. Raises BrokerUnreachable, TopicMissing."""
        until = time.monotonic() + _NEW_TOPIC_S
        while missing := set(topics) - self._topics():
            if time.monotonic() > until:
                name = min(missing)
                raise TopicMissing(f"topic {name} does not exist; `headrace topics create` makes it")
            time.sleep(0.1)

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
    ) -> None:
        """Hand one record over, waiting while the buffer is full. Raises DeliveryFailed for any earlier record."""
        while True:
            if self._failures:
                self._raise_failures()
            try:
                self._producer.produce(topic, value, key, headers=list(headers), on_delivery=self._delivered)
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as error:
                raise DeliveryFailed(
                    error.args[0].str(), 1, [(key or b"").decode("utf-8", "replace")]
                ) from None

    def flush(self, patience: float = float("inf")) -> None:
        """Wait until Kafka has everything, or has given up on it. Raises DeliveryFailed.

        patience: seconds after which what is left is dropped, which is no failure.
        """
        until = time.monotonic() + patience
        while self._producer.flush(min(1.0, max(until - time.monotonic(), 0.05))):
            if time.monotonic() >= until:
                self._producer.purge()
        if self._failures:
            self._raise_failures()

    def drop(self) -> None:
        """Forget what Kafka has not taken yet. Not for further use: an idempotent producer has to start anew then."""
        self._producer.purge()

    def _topics(self) -> set[str]:
        """Names of all topics: asking for one by name would make it on some brokers.

        Asked in a thread of its own, since librdkafka keeps the caller from noticing a Ctrl-C until it answers.
        """
        answer: list[set[str]] = []
        failure = [BrokerUnreachable("Kafka does not answer")]

        def ask() -> None:
            try:
                with self._heard.explaining(self._producer):
                    answer.append(set(self._producer.list_topics(timeout=_PATIENCE_S).topics))
            except BrokerUnreachable as error:
                failure.append(error)

        thread = Thread(target=ask, daemon=True)
        thread.start()
        thread.join()
        if not answer:
            raise failure[-1]
        return answer[0]

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.confirmed += 1
            return
        if error.code() in _DROPPED:
            return
        self._failures += 1
        self._reason = error.str()
        if len(self._failed_keys) < _KEYS_TOLD:
            self._failed_keys.append((message.key() or b"").decode("utf-8", "replace"))

    def _raise_failures(self) -> None:
        failures, keys = self._failures, self._failed_keys
        self._failed_keys, self._failures = [], 0
        raise DeliveryFailed(f"{failures} records did not reach Kafka: {self._reason}", failures, keys)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Ours below the user's."""
    return {
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": "lz4",
        "linger.ms": 20,
        "queue.buffering.max.messages": 50_000,
        "queue.buffering.max.kbytes": 64 * 1024,
        "message.timeout.ms": 120_000,
        "allow.auto.create.topics": False,
        **for_producer(config),
    }
