"""Why a broker does not answer: librdkafka's exceptions never say, its log lines do."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaException

from headrace.client.errors import BrokerUnreachable

log = logging.getLogger(__name__)
log.addHandler(
    logging.NullHandler()
)  # a library's: heard where the program logs, and not on its stderr otherwise

# What a failed connection's last words mean, and the property to look at. The first that fits counts.
_MEANINGS = (
    ("authentication", "Check sasl.mechanism, sasl.username and sasl.password"),
    ("mechanism handshake", "Set sasl.mechanism to one that the broker has"),
    ("certificate verify failed", "Set ssl.ca.location to the certificate of the authority that signed the broker's"),
    ("alert", "The broker asks for a certificate: set ssl.certificate.location and ssl.key.location"),
    ("PLAINTEXT broker listener", "The broker takes no TLS there: check the port and security.protocol"),
    ("SSL connection closed", "The broker may ask for a login: set security.protocol to SASL_SSL"),
    ("APIVERSION_QUERY", "The broker may take TLS alone: set security.protocol to SSL or SASL_SSL"),
    ("SSL handshake", "The broker may not take TLS there: check the port and security.protocol"),
)  # fmt: skip


class Heard:
    """A logger for librdkafka that keeps why the last connection failed."""

    def __init__(self) -> None:
        self.reason = ""

    def log(self, level: int, message: str, *args: Any) -> None:
        """A line of librdkafka's. Those about connections tell the caller's error why, and nobody else."""
        if args and args[0] == "FAIL":
            self.reason = str(args[-1])
        log.log(logging.DEBUG if args and args[0] in ("FAIL", "ERROR") else level, message, *args)

    @contextmanager
    def explaining(self, client: Any) -> Iterator[None]:
        """Raise BrokerUnreachable with the reason where ``client``, whose logger this is, raises KafkaException."""
        try:
            yield
        except KafkaException as error:
            client.poll(0)  # the lines are handed over in here
            reason = self.reason or error.args[0].str()
            raise BrokerUnreachable(f"Kafka does not answer: {reason}", remedy(reason)) from None


def remedy(reason: str) -> str:
    """What to do about a connection that failed for ``reason``; empty where nothing more is known."""
    for sign, meaning in _MEANINGS:
        if sign in reason:
            return f"{meaning} (HEADRACE_KAFKA_SASL_MECHANISM is sasl.mechanism, and so on)."
    return ""
