"""The dead-letter topic, read: which records lie there, where they came from and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import Message

from headrace.client.readback import Place, place_of, read_all
from headrace.schemas import Source, dead_letter_source
from headrace.schemas import topics as names
from headrace.schemas.kafka_headers import headers_of


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter, without the bytes of its record (``size`` of them).

    source: where its record first lay, and the run that it died in; None for a record that no worker put there.
    """

    topic: str
    partition: int
    offset: int
    written_at: datetime
    source: Source | None
    code: str
    message: str
    tenant: str
    batch_id: str | None
    custom_id: str | None
    size: int

    @property
    def name(self) -> str:
        """What people call it: partition and offset."""
        return f"{self.partition}:{self.offset}"

    @property
    def place(self) -> Place:
        """Where it lies."""
        return self.topic, self.partition, self.offset


def dead_letters(kafka: Mapping[str, Any], topic: str) -> Iterator[DeadLetter]:
    """The letters on the dead-letter topic, up to its present end. Raises BrokerUnreachable, TopicMissing."""
    return map(dead_letter, read_all(kafka, topic))


def dead_letter(message: Message) -> DeadLetter:
    """What the headers of a record on the dead-letter topic say."""
    headers = headers_of(message)
    text = {name: (value or b"").decode("utf-8", "replace") for name, value in headers}
    return DeadLetter(
        *place_of(message),
        written_at=datetime.fromtimestamp(max(message.timestamp()[1], 0) / 1000, UTC),
        source=dead_letter_source(headers),
        code=text.get(names.DEAD_CODE, ""),
        message=text.get(names.DEAD_MESSAGE, ""),
        tenant=text.get(names.TENANT) or "default",
        batch_id=text.get(names.BATCH_ID) or None,
        custom_id=text.get(names.CUSTOM_ID) or None,
        size=len(message.value() or b""),
    )
