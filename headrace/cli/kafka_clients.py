"""Whether librdkafka takes the properties that are set, told before anything is loaded or started for nothing.

Each kind of client is made once, and ended before it has connected. One kind alone may refuse what the others take: only
consumers compare `session.timeout.ms` with `max.poll.interval.ms`, and only producers `message.timeout.ms` with `linger.ms`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.settings import Settings
    from headrace.worker import WorkerConfig

NOWHERE = "127.0.0.1:1"
_UNCONNECTED = {"bootstrap.servers": NOWHERE, "log_level": 0}


def check_worker_clients(config: "WorkerConfig") -> None:
    """Raise KafkaException, which names the property, where a client of this worker is not made with what is set."""
    from headrace.worker import consumer, control, publisher

    _consumer(consumer.with_defaults(config.consumer(config.tiers[0].name), prefetch=1, max_bytes=1))
    _consumer(control.with_defaults(config.control()))
    _producer(publisher.with_defaults(config.producer()))


def check_recorder_client(kafka: "Mapping[str, str]") -> None:
    """The same of a recorder's client."""
    from headrace.ledger import recorder

    _consumer(recorder.with_defaults(kafka, "nobody"))


def check_other_clients(settings: "Settings") -> None:
    """The same of the clients with which commands submit and read."""
    from headrace.client import outbox, reading
    from headrace.client.heard import Heard

    _consumer(reading.properties(settings.kafka, Heard(), "nobody"))
    _producer(outbox.with_defaults(settings.kafka))


def _consumer(properties: "Mapping[str, Any]") -> None:
    from confluent_kafka import Consumer

    Consumer({**properties, **_UNCONNECTED}).close()


def _producer(properties: "Mapping[str, Any]") -> None:
    from confluent_kafka import Producer

    Producer({**properties, **_UNCONNECTED})
