"""Sending records once more, as the next run of their jobs."""

from collections.abc import Mapping
from typing import Any, Self

from confluent_kafka import Message

from headrace.client.outbox import Outbox
from headrace.schemas import Source, repeat_headers
from headrace.schemas.kafka_headers import headers_of
from headrace.schemas.topics import MAX_LETTER_BYTES


class Repeater:
    """Sends records back to the topic they came from, byte for byte. For one thread; use it as a context."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        # Its headers have grown a little, so the broker decides and not the client's limit.
        self._outbox = Outbox({"message.max.bytes": MAX_LETTER_BYTES, **kafka})

    def send(self, message: Message, source: Source) -> None:
        """Send the record of ``source`` as ``source.run``. Raises DeliveryFailed, for any earlier record too."""
        headers = repeat_headers(headers_of(message), source)
        self._outbox.send(source.topic, message.key(), message.value(), headers)

    def flush(self) -> None:
        """Wait until Kafka has everything. Raises DeliveryFailed."""
        self._outbox.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()
