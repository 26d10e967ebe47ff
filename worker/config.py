"""What a worker is told: plain values; the command line makes them from the environment."""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.schemas import Topics
from headrace.schemas.kafka_properties import for_consumer, for_producer
from headrace.schemas.topics import MAX_LETTER_BYTES
from headrace.worker.brake import DeadLetterLimit
from headrace.worker.tiers import Tier, check_together, default_tiers

LEAST_IN_FLIGHT = 256
"""Jobs that may be in flight, where nobody says how many, in the smallest of engines."""

BYTES_A_JOB = 256 * 1024
"""Of records, that a tier may keep in memory for each job that may be in flight."""


def unique_name() -> str:
    """Host, process and a random part: an attempt of a former life of this worker must not look like one of this."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker.

    bootstrap: Kafka's addresses. kafka: librdkafka properties for all clients (security and the like). topics: where
    jobs come from and results go. tiers: how each of ``topics.tiers`` is served; by default as default_tiers says.
    model_names: further names that jobs may call the engine's model by. max_in_flight: jobs in the engine at once, those
    that wait inside it included; None for as many as in_flight says. A tier that preempts does not count the jobs of lower
    ones. max_held_bytes: records kept in memory, for each tier; None for BYTES_A_JOB for each that may be in flight.
    max_result_bytes: of a result on the results topic; larger
    ones go to result_store (a directory or ``s3://bucket/prefix``) or, without one, fail. grace_s: how long what runs may
    go on after a stop. alive_s: how long after the last heartbeat other workers take this one for dead. name: unique to
    this process's life. group_protocol: "consumer" is KIP-848 (brokers 4.0 and newer). dead_letters: beyond how many the
    worker takes nothing more for a while.
    """

    bootstrap: str
    topics: Topics = field(default_factory=Topics)
    tiers: tuple[Tier, ...] = ()
    kafka: Mapping[str, Any] = field(default_factory=dict)
    group_protocol: Literal["classic", "consumer"] = "classic"
    model_names: tuple[str, ...] = ()
    max_in_flight: int | None = None
    max_held_bytes: int | None = None
    max_result_bytes: int = 900_000
    result_store: str | None = None
    grace_s: float = 30.0
    alive_s: float = 15.0
    dead_letters: DeadLetterLimit = field(default_factory=DeadLetterLimit)
    name: str = field(default_factory=unique_name)

    def __post_init__(self) -> None:
        if not self.tiers:
            object.__setattr__(self, "tiers", default_tiers(self.topics.tiers))
        if tuple(tier.name for tier in self.tiers) != self.topics.tiers:
            raise ValueError(f"tiers must be those of the topics, in their order: {self.topics.tiers}")
        check_together(self.tiers, self.max_in_flight or LEAST_IN_FLIGHT)

    def in_flight(self, slots: int) -> int:
        """How many jobs may be in flight in an engine of so many slots.

        By default an eighth more than its slots, and LEAST_IN_FLIGHT at least; of those, as many as it was seen to run and
        places.WAITING more. On an H200 with 2,048 slots chat loses nothing so against knowing all jobs (bench/rolling.py).
        """
        return self.max_in_flight or max(LEAST_IN_FLIGHT, slots + slots // 8)

    def held_bytes(self, in_flight: int) -> int:
        """How many bytes of records a tier may keep in memory where so many jobs may be in flight."""
        return self.max_held_bytes or BYTES_A_JOB * in_flight

    @property
    def pool(self) -> str:
        """The pool's name in the job table."""
        return self.topics.pool or "default"

    def client(self) -> dict[str, Any]:
        """Properties that every Kafka client of this worker has."""
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": self.name,
            "reconnect.backoff.ms": 500,  # from its default of 100, a lost broker fills the log
            **self.kafka,
        }

    def consumer(self, tier: str) -> dict[str, Any]:
        """Properties of one tier's consumer: a group for each tier, so that one's backlog is not another's lag."""
        group = f"{self.topics.prefix}.workers.{self.pool}.{tier}"
        protocol = {"group.protocol": "consumer"} if self.group_protocol == "consumer" else {}
        return {**protocol, **for_consumer(self.client()), "group.id": group}

    def producer(self) -> dict[str, Any]:
        """Properties of the producer. What a topic takes is for the broker to say: dead letters are as they came.

        It takes or refuses whole batches, so one of several records is no larger than a single one may be.
        """
        sizes = {"message.max.bytes": MAX_LETTER_BYTES, "batch.size": min(1_000_000, self.max_result_bytes)}
        return {**sizes, **for_producer(self.client())}

    def control(self) -> dict[str, Any]:
        """Properties of the control topic's consumer."""
        return {"group.id": f"{self.topics.prefix}.control.{self.name}", **for_consumer(self.client())}
