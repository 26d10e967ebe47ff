"""The control topic: cancels, broadcast to every worker.

Each worker reads all of it, without a group, from a little before its own start: the job table holds older cancels,
and the overlap covers a recorder that is behind. What was cancelled is remembered for a while, so that a cancel that
comes before its job still holds.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition

from headrace.ledger import kafka_log
from headrace.schemas import CancelBatch, CancelJob, Unparsable, parse_control

log = logging.getLogger(__name__)

LOOK_BACK_S = 3600.0
AGAIN_AFTER_S = 1.0
LOOK_FOR_PARTITIONS_S = 30.0  # a topic may be given more of them while we read it

Cancel = CancelJob | CancelBatch


class Cancels:
    """What was cancelled lately: the newest ``most`` jobs and batches."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._targets: OrderedDict[tuple[str, UUID | str], None] = OrderedDict()  # tenant, and job or batch

    def add(self, cancel: Cancel) -> None:
        target = cancel.tenant, cancel.key if isinstance(cancel, CancelJob) else cancel.batch_id
        self._targets[target] = None
        self._targets.move_to_end(target)
        if len(self._targets) > self._most:
            self._targets.popitem(last=False)

    def cover(self, id: UUID, tenant: str, batch_id: str | None) -> bool:
        """Whether this tenant has cancelled this job, or its batch: what the job table asks too."""
        return (tenant, id) in self._targets or (batch_id is not None and (tenant, batch_id) in self._targets)


class ControlConsumer:
    """A thread that puts each cancel into ``inbox`` and sets ``wake``."""

    def __init__(
        self, settings: Mapping[str, Any], topic: str, inbox: deque[Cancel], wake: threading.Event
    ) -> None:
        self._settings = with_defaults(settings)
        self._topic, self._inbox, self._wake = topic, inbox, wake
        self._closing = threading.Event()
        self._ends: dict[
            int, int
        ] = {}  # by partition: where the topic ended at the start, while that is not reached
        self._caught_up = threading.Event()
        self._partitions: frozenset[int] = frozenset()
        self._look_at = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read. Raises KafkaException for settings that librdkafka does not take."""
        consumer = Consumer(self._settings, **kafka_log.callbacks(self._settings["bootstrap.servers"]))
        self._thread = threading.Thread(target=self._run, args=(consumer,), name="control", daemon=True)
        self._thread.start()

    def wait_until_caught_up(self, timeout: float) -> bool:
        """Wait until what stood in the topic at the start has been read: a job that comes now finds its cancel."""
        return self._caught_up.wait(timeout)

    def close(self, timeout: float) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, consumer: Consumer) -> None:
        try:
            while not self._closing.is_set() and not self._assign(consumer):
                self._closing.wait(AGAIN_AFTER_S)
            self._look_at = time.monotonic() + LOOK_FOR_PARTITIONS_S
            while not self._closing.is_set():
                message = consumer.poll(0.2)
                if message is not None:
                    self._receive(message)
                if not self._caught_up.is_set():
                    self._look_whether_caught_up(consumer)
                if time.monotonic() >= self._look_at:
                    self._take_new_partitions(consumer)
        except Exception:
            # Cancels then come late, through the job table; that is no reason to stop answering.
            log.exception("the control topic is not read any more")
        finally:
            consumer.close()

    def _assign(self, consumer: Consumer) -> bool:
        """Take every partition, from LOOK_BACK_S ago; False where the topic cannot be had yet."""
        since = int((time.time() - LOOK_BACK_S) * 1000)
        try:
            self._partitions = self._ask_partitions(consumer)
            asked = [TopicPartition(self._topic, partition, since) for partition in self._partitions]
            found = consumer.offsets_for_times(asked, timeout=10)
            for each in found:
                self._ends[each.partition] = consumer.get_watermark_offsets(each, timeout=10)[1]
                if each.offset < 0:  # nothing that young: from the end, as it is now
                    each.offset = self._ends[each.partition]
        except KafkaException as error:
            log.warning("cannot read %s: %s", self._topic, error)
            return False
        self._pass_over_reached(found)
        consumer.incremental_assign(found)
        return True

    def _take_new_partitions(self, consumer: Consumer) -> None:
        """Read what the topic has been given since, each partition from its beginning."""
        self._look_at = time.monotonic() + LOOK_FOR_PARTITIONS_S
        try:
            if new := self._ask_partitions(consumer) - self._partitions:
                log.info("%s has new partitions: %s", self._topic, sorted(new))
                consumer.incremental_assign(
                    [TopicPartition(self._topic, each, OFFSET_BEGINNING) for each in new]
                )
                self._partitions |= new
        except KafkaException as error:
            log.debug("cannot take new partitions of %s: %s", self._topic, error)

    def _ask_partitions(self, consumer: Consumer) -> frozenset[int]:
        topic = consumer.list_topics(self._topic, timeout=10).topics[self._topic]
        if topic.error is not None:
            raise KafkaException(topic.error)
        return frozenset(topic.partitions)

    def _look_whether_caught_up(self, consumer: Consumer) -> None:
        if self._ends:
            asked = [TopicPartition(self._topic, partition) for partition in self._ends]
            self._pass_over_reached(consumer.position(asked))
        if not self._ends:
            self._caught_up.set()

    def _pass_over_reached(self, positions: list[TopicPartition]) -> None:
        reached = {each.partition for each in positions if each.offset >= self._ends[each.partition]}
        self._ends = {partition: end for partition, end in self._ends.items() if partition not in reached}

    def _receive(self, message: Message) -> None:
        if message.error() is not None:
            log.warning("%s: %s", self._topic, message.error())
            return
        try:
            control = parse_control(message.value())
        except Unparsable as error:
            log.warning("%s[%s] at %s: %s", self._topic, message.partition(), message.offset(), error.code)
            return
        except Exception as error:  # a defect of ours: it must cost this message, not every cancel after it
            kafka_log.unread(self._topic, message.partition(), message.offset(), error)
            return
        if isinstance(control, CancelJob | CancelBatch):
            self._inbox.append(control)
            self._wake.set()


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """For partitions assigned by hand: the group is never joined and nothing is committed, but librdkafka wants a name."""
    given = {name: value for name, value in settings.items() if name != "group.protocol"}
    return {**given, "enable.auto.commit": False, "auto.offset.reset": "latest"}
