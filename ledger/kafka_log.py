"""What a process that stays says of Kafka: one line that helps, for librdkafka's many, and one for a record unread.

librdkafka tells each failed connection at ERROR, each client for itself, for as long as it lasts.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import cache
from typing import Any

from confluent_kafka import KafkaError

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0
REMEDY = "check KAFKA_BOOTSTRAP_SERVERS and that the broker is up; `headrace doctor` tells more"
_CONNECTION_LINES = frozenset({"FAIL", "ERROR"})
_ATTEMPTS = frozenset({
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
})  # fmt: skip
_UNREACHABLE = frozenset({
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
})  # fmt: skip


@cache
def callbacks(bootstrap: str) -> dict[str, Any]:
    """The ``logger`` and ``error_cb`` of every client of this process at these addresses."""
    kafka_log = KafkaLog(bootstrap)
    return {"logger": kafka_log, "error_cb": kafka_log.note}


def unread(topic: str, partition: int, offset: int, error: Exception) -> None:
    """A defect of ours keeps a record from being read. Its own words come at DEBUG only: they may quote the prompt."""
    log.error("cannot read %s[%s] at %s: %s", topic, partition, offset, type(error).__name__)
    log.debug("where", exc_info=error)


class KafkaLog:
    """Takes librdkafka's log lines and errors; safe to share between clients and threads."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._lock = threading.Lock()
        self._reason = ""
        self._next = 0.0

    def log(self, level: int, message: str, *args: Any) -> None:
        """A line of librdkafka's. Those about connections are told by ``note``; some reasons are in them alone."""
        if args and args[0] == "FAIL":
            self._reason = str(args[-1])
        log.log(logging.DEBUG if args and args[0] in _CONNECTION_LINES else level, message, *args)

    def note(self, error: KafkaError) -> None:
        """An error that no call returned."""
        if error.code() in _ATTEMPTS:
            self._reason = error.str()
        elif error.code() in _UNREACHABLE:
            reason = self._reason if error.code() == KafkaError._ALL_BROKERS_DOWN else error.str()
            self._say_unreachable(reason or error.str())
        else:
            log.warning("Kafka: %s", error.str())

    def _say_unreachable(self, reason: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + SAY_AGAIN_S
        log.error("Kafka cannot be reached at %s: %s; %s", self._bootstrap, reason, REMEDY)
