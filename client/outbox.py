"""A producer that waits when its buffer is full, and knows which records did not arrive."""

from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.client.errors import DeliveryFailed

_FEW = 10


class Outbox:
    """Sends records to Kafka: idempotent, acknowledged by all replicas, with bounded memory. For one thread."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._producer = Producer(
            {
                "enable.idempotence": True,
                "acks": "all",
                "compression.type": "lz4",
                "linger.ms": 20,
                "queue.buffering.max.messages": 50_000,
                "queue.buffering.max.kbytes": 64 * 1024,
                "message.timeout.ms": 120_000,
                **config,
            }
        )
        self._failed: list[str] = []
        self._failures = 0
        self._reason = ""

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
                self._raise()
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

    def flush(self) -> None:
        """Wait until Kafka has everything, or has given up on it. Raises DeliveryFailed."""
        while self._producer.flush(1.0):
            pass
        if self._failures:
            self._raise()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            return
        self._failures += 1
        self._reason = error.str()
        if len(self._failed) < _FEW:
            self._failed.append((message.key() or b"").decode("utf-8", "replace"))

    def _raise(self) -> None:
        failures, keys = self._failures, self._failed
        self._failed, self._failures = [], 0
        raise DeliveryFailed(f"{failures} records did not reach Kafka: {self._reason}", failures, keys)
