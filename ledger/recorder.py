"""The recorder: a consumer group of its own that enters jobs, batches and cancels into the table as they arrive.

It reads the envelope of each record and nothing else, and neither waits for workers nor makes them wait. Everything
it writes may be written again, so it commits offsets after the write and nothing worse than a repeat can happen.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from headrace.ledger import kafka_log
from headrace.ledger.errors import LedgerUnavailable
from headrace.ledger.kafka_errors import never_mends
from headrace.ledger.ledger import Ledger
from headrace.ledger.outage import Outage
from headrace.ledger.rows import JobRow, RejectionRow
from headrace.ledger.topic_ids import TopicIds
from headrace.ledger.upkeep import Upkeep, chores
from headrace.ledger.watch import RecorderMetrics, RecorderStatus
from headrace.schemas import (
    ControlMessage,
    Envelope,
    ErrorCode,
    Source,
    Topics,
    Unparsable,
    parse_control,
    parse_envelope,
    source_of,
)
from headrace.schemas.envelope import submission_of
from headrace.schemas.kafka_headers import headers_of
from headrace.schemas.kafka_properties import for_consumer

log = logging.getLogger(__name__)

BULK = 5000
GATHER_S = 0.05  # how long a record waits for company
KEEP = timedelta(days=90)
STATUS_EVERY_S = 1.0


@dataclass
class Bulk:
    """Records on their way into the table, and the offsets behind them."""

    jobs: list[JobRow] = field(default_factory=list)
    rejections: list[RejectionRow] = field(default_factory=list)
    control: list[ControlMessage] = field(default_factory=list)
    behind: dict[tuple[str, int], int] = field(default_factory=dict)

    def offsets(self) -> list[TopicPartition]:
        """What may be committed once the bulk is written."""
        return [
            TopicPartition(topic, partition, offset) for (topic, partition), offset in self.behind.items()
        ]


class Recorder:
    """Records the jobs of every pool.

    Args:
        bootstrap: Kafka's addresses.
        topics: their prefix says which; the topics of all pools and tiers are found by name.
        ledger: where to.
        kafka: further librdkafka properties (security and the like).
        group: the consumer group; recorders of one group share the work.
        keep: how long the table keeps what has ended. Longer than the topics keep records, or a replay would run
            jobs again.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Topics,
        ledger: Ledger,
        *,
        kafka: Mapping[str, Any] | None = None,
        group: str | None = None,
        keep: timedelta = KEEP,
    ) -> None:
        self._ledger, self._keep = ledger, keep
        self._control = topics.control
        self._jobs_prefix = f"{topics.prefix}.jobs.v1."
        # Topics that begin with ^ are patterns.
        self._topics = ["^" + self._jobs_prefix.replace(".", r"\.") + ".+", self._control]
        self._settings = {
            **with_defaults(
                {"bootstrap.servers": bootstrap, **(kafka or {})}, group or topics.recorder_group
            ),
            "on_commit": _on_commit,
        }
        self._pools_and_tiers: dict[str, tuple[str, str]] = {}
        self._held: list[Message] = []
        self._waiting = 0  # records that Postgres does not take for now
        self._writing: tuple[Bulk, Future[bool]] | None = None
        self._next_status = 0.0
        self._made_anew: set[str] = set()  # topics that are not read from their beginning yet
        self.metrics = RecorderMetrics()

    def status(self) -> RecorderStatus:
        """What the recorder was doing lately; safe to ask from any thread."""
        return self.metrics.status

    def run(self, stop: Event) -> None:
        """Record until `stop` is set. Raises KafkaException on what no retry mends, LedgerError likewise."""
        consumer = Consumer(self._settings, **kafka_log.callbacks(self._settings["bootstrap.servers"]))
        consumer.subscribe(self._topics, on_assign=_on_assign)
        ids = TopicIds(self._settings)
        upkeep = Upkeep(chores(self._ledger, self.metrics, self._keep), self.metrics)
        upkeep.start(stop)
        with ThreadPoolExecutor(1, "recorder-write") as writer:
            try:
                while not stop.is_set():
                    upkeep.check()
                    self._start_over_where_made_anew(consumer, ids)
                    self._turn(consumer, writer, stop)
                self._settle(consumer)
            finally:
                stop.set()
                consumer.close()
                upkeep.join()

    def _turn(self, consumer: Consumer, writer: ThreadPoolExecutor, stop: Event) -> None:
        self._take_status(consumer)
        messages, self._held = [*self._held, *consumer.consume(BULK, GATHER_S)], []
        bulk = self._read(messages)  # while the one before is written
        self._settle(consumer)
        if bulk.behind:
            self._writing = bulk, writer.submit(self._write, bulk, stop)

    def _start_over_where_made_anew(self, consumer: Consumer, ids: TopicIds) -> None:
        assigned = consumer.assignment()
        self._made_anew |= ids.made_anew({each.topic for each in assigned})
        places = [each for each in assigned if each.topic in self._made_anew]
        if not places:
            return
        self._settle(consumer)
        with contextlib.suppress(KafkaException):  # a partition that is just being assigned: in the next turn
            for each in places:
                consumer.seek(TopicPartition(each.topic, each.partition, OFFSET_BEGINNING))
            topics = {each.topic for each in places}
            log.warning("deleted and made again, read from the beginning: %s", ", ".join(sorted(topics)))
            self._made_anew -= topics
            self._held = [message for message in self._held if message.topic() not in topics]
            first = [TopicPartition(each.topic, each.partition, 0) for each in places]
            consumer.commit(offsets=first, asynchronous=True)

    def _settle(self, consumer: Consumer) -> None:
        """Wait for the bulk that is being written, and commit the offsets behind it."""
        if self._writing is None:
            return
        (bulk, written), self._writing = self._writing, None
        waited = False
        while not wait([written], 1.0).done:
            waited = True
            self._keep_polling(consumer)
        if waited:
            consumer.resume(consumer.assignment())
        if written.result():
            consumer.commit(offsets=bulk.offsets(), asynchronous=True)  # close waits for it

    def _keep_polling(self, consumer: Consumer) -> None:
        """Stay in the group without taking more in. A partition assigned meanwhile may still hand over a record."""
        self._take_status(consumer)
        consumer.pause(consumer.assignment())
        message = consumer.poll(0)
        if message is not None:
            self._held.append(message)

    def _write(self, bulk: Bulk, stop: Event) -> bool:
        """Write it, for as long as it takes; False if told to stop before that."""
        outage = Outage(log)
        while True:
            began = time.monotonic()
            try:
                self._ledger.apply_control(bulk.control)
                new = self._ledger.record(bulk.jobs, bulk.rejections)
            except LedgerUnavailable as error:
                outage.lasts("Postgres", f"Postgres is away, {len(bulk.jobs)} records wait", error)
                self.metrics.unavailable()
                self._waiting = len(bulk.jobs) + len(bulk.rejections) + len(bulk.control)
                if stop.wait(1.0):
                    return False
            else:
                outage.over()
                log.debug("recorded %d jobs, %d of them new", len(bulk.jobs), new)
                counts = len(bulk.jobs), len(bulk.rejections), len(bulk.control)
                self.metrics.written(*counts, new=new, seconds=time.monotonic() - began)
                self._waiting = 0
                return True

    def _read(self, messages: Iterable[Message]) -> Bulk:
        bulk = Bulk()
        for message in messages:
            if error := message.error():
                _note(error)
                continue
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            headers = headers_of(message)
            source = source_of(headers, topic, partition, offset, message.timestamp()[1])
            bulk.behind[topic, partition] = offset + 1
            try:
                if topic == self._control:
                    bulk.control.append(parse_control(message.value()))
                else:
                    envelope = parse_envelope(message.value(), headers, source)
                    bulk.jobs.append(self._job(envelope, source, submission_of(headers)))
            except Unparsable as error:
                bulk.rejections.append(_rejection(error, source, submission_of(headers)))
            except Exception as error:
                # A defect of ours. It must cost this record and not the recorder, which would meet it again and again.
                kafka_log.unread(topic, partition, offset, error)
                why = f"reading the record failed with {type(error).__name__}"
                unread = Unparsable(ErrorCode.INTERNAL_ERROR, why)
                bulk.rejections.append(_rejection(unread, source, submission_of(headers)))
        return bulk

    def _pool_and_tier(self, topic: str) -> tuple[str, str]:
        if topic not in self._pools_and_tiers:
            *pool, tier = topic.removeprefix(self._jobs_prefix).split(".")
            self._pools_and_tiers[topic] = pool[0] if pool else "default", tier
        return self._pools_and_tiers[topic]

    def _job(self, envelope: Envelope, source: Source, submission: str | None) -> JobRow:
        pool, tier = self._pool_and_tier(source.topic)
        return JobRow.of(envelope, source, tier, pool, submission)

    def _take_status(self, consumer: Consumer) -> None:
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            assigned = consumer.assignment()
            lag = sum(_behind(consumer, each) for each in consumer.position(assigned))
            self.metrics.status = RecorderStatus(
                len(assigned), self._waiting, lag, dict(self.metrics.upkeep_failing)
            )


def with_defaults(kafka: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Properties of a recorder's consumer: ours below the user's, what correctness rests on above both."""
    return {
        "topic.metadata.refresh.interval.ms": 10_000,  # how soon a new pool's topics are found
        **for_consumer(kafka),
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }


def _behind(consumer: Consumer, at: TopicPartition) -> int:
    """Records between the position and the partition's end, as librdkafka last heard of it: no question asked."""
    ends = consumer.get_watermark_offsets(at, cached=True)
    return max(0, ends[1] - at.offset) if ends is not None and at.offset >= 0 else 0


def _rejection(error: Unparsable, source: Source, submission: str | None) -> RejectionRow:
    return RejectionRow(
        source.topic,
        source.partition,
        source.offset,
        error.tenant,
        error.code,
        error.message,
        error.batch_id,
        error.custom_id,
        source.run,
        submission,
    )


def _on_assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
    log.info("assigned %d partitions", len(partitions))


def _note(error: KafkaError) -> None:
    if never_mends(error):
        raise KafkaException(error)
    log.warning("Kafka: %s", error)


def _on_commit(error: KafkaError | None, partitions: list[TopicPartition]) -> None:
    # A rebalance overtook it: the next owner reads those records again and finds them there.
    if error is not None:
        log.debug("commit: %s", error)
