"""Kafka in: one consumer, on a thread of its own, for each tier.

The thread polls also while everything is paused, so the group never takes a busy worker for a dead one; only where it
has just become full it waits a second for room instead. It alone owns the offsets: the worker tells it what is done
through ``release``, and it commits what may be committed every second, on a revoke and at the end.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from headrace.ledger.kafka_errors import never_mends
from headrace.ledger.kafka_log import callbacks
from headrace.ledger.topic_ids import TopicIds
from headrace.schemas.kafka_headers import headers_of
from headrace.worker.errors import ConsumerFailed
from headrace.worker.offsets import Assignment, OffsetTracker

log = logging.getLogger(__name__)

BATCH = 256
COMMIT_EVERY_S = 1.0
RESUME_BELOW = (
    0.75  # of the prefetch: a pause throws away what librdkafka has fetched, so it must not flutter
)
# How long it is full before it pauses: with quick jobs there is room again at once, and pausing each time made it fetch
# every record 25 times.
FULL_FOR_S = 1.0
MOST_QUEUED_KB = 2**21 - 1  # librdkafka takes no larger queue
SPAN_PER_PREFETCH = 8  # deliveries a slow job may hold up behind itself in its partition

# A commit that a rebalance overtook: the next owner delivers those records again, and finds them finished.
OVERTAKEN = frozenset({
    KafkaError._NO_OFFSET,
    KafkaError._STATE,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
})  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Delivery:
    """One record, as it was delivered under one assignment of its partition."""

    tier: str
    assignment: Assignment
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]

    @property
    def size(self) -> int:
        """Bytes it keeps in memory, roughly."""
        return len(self.value or b"") + len(self.key or b"") + 256


class TierConsumer:
    """Feeds ``inbox`` with one topic's records and commits their offsets.

    Args:
        settings: librdkafka's properties, ``bootstrap.servers`` and ``group.id`` among them.
        prefetch: records held at once, from delivery to release; then the consumer pauses.
        max_bytes: the same in bytes.
        inbox: where deliveries go; ``wake`` is set after each.
        on_committed: told of each partition's commit: ``done``, ``overtaken`` by a rebalance, or ``failed``.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        topic: str,
        tier: str,
        *,
        prefetch: int,
        max_bytes: int,
        inbox: deque[Delivery],
        wake: threading.Event,
        on_committed: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._tell_committed = on_committed
        self.lag = 0  # records behind the end of the partitions, as of the last fetch
        self.topic, self.tier = topic, tier
        self.failure: ConsumerFailed | None = None
        self.revokes = 0  # grows whenever partitions are taken away
        self.tracker = OffsetTracker()
        self._settings = {**with_defaults(settings, prefetch, max_bytes), "on_commit": self._on_commit}
        self._prefetch, self._max_bytes = prefetch, max_bytes
        self._inbox, self._wake = inbox, wake
        self._released: deque[Delivery] = deque()
        self._held = self._held_bytes = 0
        self._full = False
        self._full_since = 0.0
        self._paused: set[tuple[str, int]] = set()
        self._committed: dict[tuple[str, int], int] = {}
        self._next_commit = 0.0
        self._made_anew = False  # the topic, and it is not read from its beginning yet
        self._holding, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # --- called by the worker's thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to fetch. Raises KafkaException for settings that librdkafka does not take."""
        consumer = Consumer(self._settings, **callbacks(self._settings["bootstrap.servers"]))
        self._thread = threading.Thread(
            target=self._run, args=(consumer,), name=f"consumer-{self.tier}", daemon=True
        )
        self._thread.start()

    def release(self, delivery: Delivery) -> None:
        """Nothing more will come of this record: its offset may be committed."""
        self._released.append(delivery)

    def hold(self) -> None:
        """Deliver nothing more; go on polling, committing and keeping the partitions."""
        self._holding.set()

    def go_on(self) -> None:
        """Deliver again, after ``hold``."""
        self._holding.clear()

    def close(self, timeout: float) -> None:
        """Commit what is released, leave the group, end the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def partitions(self) -> int:
        """Partitions assigned now."""
        return len(self.tracker.assignments)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self, consumer: Consumer) -> None:
        try:
            consumer.subscribe(
                [self.topic],
                on_assign=self._guarded(self._on_assign),
                on_revoke=self._guarded(self._on_revoke),
                on_lost=self._guarded(self._on_lost),
            )
            ids = TopicIds(self._settings)
            try:
                while not self._closing.is_set() and self.failure is None:
                    self._turn(consumer)
                    self._start_over_if_made_anew(consumer, ids)
            finally:
                self._note_released()
                self._leave(consumer)
        except Exception as error:
            self._fail(error)
        finally:
            self._wake.set()

    def _fail(self, error: Exception) -> None:
        log.exception("consumer of %s ended", self.topic)
        self.failure = ConsumerFailed(f"{self.topic}: {error}")

    def _guarded(
        self, callback: Callable[[Consumer, list[TopicPartition]], None]
    ) -> Callable[[Consumer, list[TopicPartition]], None]:
        """What a callback raises comes out of ``poll`` as a KafkaError, which is no exception: no ``except`` catches it."""

        def call(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            try:
                callback(consumer, partitions)
            except Exception as error:
                self._fail(error)

        return call

    def _leave(self, consumer: Consumer) -> None:
        """Commit and leave the group. Amid a rebalance that takes librdkafka up to 5 s, for the broker to answer."""
        if not self.partitions:
            # Closed without partitions, it would leave a cooperative group without a word: the next rebalance would wait
            # for it until its session has run out.
            with contextlib.suppress(KafkaException):
                consumer.unsubscribe()
        consumer.close()  # calls _on_revoke, which commits

    def _turn(self, consumer: Consumer) -> None:
        if self._full and not self._full_for_long:
            time.sleep(0.002)  # there will be room in a moment
        elif (first := consumer.poll(0.02 if self._held else 0.1)) is not None:
            self._receive([first, *consumer.consume(BATCH, 0)])
        self._note_released()
        self._pause_or_resume(consumer)
        if time.monotonic() >= self._next_commit:
            self._next_commit = time.monotonic() + COMMIT_EVERY_S
            self._commit(consumer)
            self.lag = sum(_behind(consumer, each) for each in self.tracker.assignments)

    def _receive(self, messages: list[Message]) -> None:
        for message in messages:
            if message.error() is not None:
                self._note_error(message.error())
                continue
            assignment = self.tracker.deliver(message.topic(), message.partition(), message.offset())
            if assignment is None:
                continue  # fetched before a revoke that has happened since
            delivery = _delivery(message, self.tier, assignment)
            self._held += 1
            self._held_bytes += delivery.size
            self._inbox.append(delivery)
        self._wake.set()

    def _note_error(self, error: KafkaError) -> None:
        if never_mends(error):
            raise KafkaException(error)
        log.warning("%s: %s", self.topic, error)

    def _note_released(self) -> None:
        while self._released:
            delivery = self._released.popleft()
            delivery.assignment.done(delivery.offset)
            self._held -= 1
            self._held_bytes -= delivery.size

    def _start_over_if_made_anew(self, consumer: Consumer, ids: TopicIds) -> None:
        """Without partitions there is nothing to start over, and whatever is assigned next begins where we left off."""
        places = [TopicPartition(a.topic, a.partition, OFFSET_BEGINNING) for a in self.tracker.assignments]
        if ids.made_anew([self.topic] if places else []):
            self._made_anew = True
            log.warning("%s was deleted and made again: reading it from its beginning", self.topic)
        if not self._made_anew or not places:
            return
        with contextlib.suppress(KafkaException):  # a partition that is just being assigned: in the next turn
            for place in places:
                consumer.seek(place)
            self._made_anew = False
            self.tracker.start_over()
            self._send_commit(consumer, {(each.topic, each.partition): 0 for each in places})

    # --- back pressure --------------------------------------------------------------------------------------------

    def _pause_or_resume(self, consumer: Consumer) -> None:
        limit = RESUME_BELOW if self._full else 1.0
        if not self._full:
            self._full_since = time.monotonic()
        self._full = self._held >= limit * self._prefetch or self._held_bytes >= limit * self._max_bytes
        wanted = {(a.topic, a.partition) for a in self.tracker.assignments if self._must_pause(a)}
        if wanted != self._paused:
            self._assert_pauses(consumer, wanted)

    @property
    def _full_for_long(self) -> bool:
        return self._full and time.monotonic() - self._full_since >= FULL_FOR_S

    def _must_pause(self, assignment: Assignment) -> bool:
        return (
            self._full_for_long
            or self._holding.is_set()
            or assignment.span >= SPAN_PER_PREFETCH * self._prefetch
        )

    def _assert_pauses(self, consumer: Consumer, wanted: set[tuple[str, int]]) -> None:
        assigned = {(a.topic, a.partition) for a in self.tracker.assignments}
        if pause := wanted - self._paused:
            consumer.pause([TopicPartition(*key) for key in pause])
        if resume := (self._paused - wanted) & assigned:
            consumer.resume([TopicPartition(*key) for key in resume])
            _knock(consumer, resume)
        self._paused = wanted

    # --- offsets --------------------------------------------------------------------------------------------------

    def _commit(self, consumer: Consumer) -> None:
        due = {key: at for key, at in self.tracker.committable().items() if self._committed.get(key) != at}
        self._send_commit(consumer, due)

    def _send_commit(self, consumer: Consumer, offsets: dict[tuple[str, int], int]) -> None:
        """Never waits, not even on a revoke: the broker gets it before this member rejoins or leaves the group."""
        if not offsets:
            return
        self._committed.update(offsets)
        try:
            consumer.commit(offsets=_offsets(offsets), asynchronous=True)
        except KafkaException as error:
            self._on_commit(error.args[0], _offsets(offsets))

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        for each in offsets:
            wrong = error or each.error
            place = each.topic, each.partition
            if wrong is None:
                self._tell_committed("done")
                # librdkafka sends a commit again that a lost connection took, after a newer one perhaps. Then this
                # older offset is what the broker has.
                if self._committed.get(place) != each.offset:
                    self._committed.pop(place, None)
                continue
            self._committed.pop(place, None)  # try again in a second
            overtaken = wrong.code() in OVERTAKEN
            self._tell_committed("overtaken" if overtaken else "failed")
            level = logging.DEBUG if overtaken else logging.WARNING
            log.log(level, "commit of %s[%s] at %s: %s", each.topic, each.partition, each.offset, wrong)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        # A pause may survive a rebalance or not (it does when partitions are lost): start from a known state.
        consumer.resume(partitions)
        for each in partitions:
            self.tracker.assign(each.topic, each.partition)
            self._committed.pop((each.topic, each.partition), None)
            self._paused.discard((each.topic, each.partition))
        self._pause_or_resume(consumer)
        # A cooperative rebalance that leaves a member what it has, or takes of it, ends with none added.
        if partitions:
            log.info("assigned %s", _names(partitions))
        elif not self.partitions:
            log.info("assigned no partition of %s", self.topic)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._note_released()
        leaving = {(each.topic, each.partition) for each in partitions}
        last = {key: offset for key, offset in self.tracker.committable().items() if key in leaving}
        self._send_commit(consumer, last)
        self._drop(partitions)
        if partitions:
            log.info("revoked %s", _names(partitions))

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._drop(partitions)
        log.warning("lost %s", _names(partitions))

    def _drop(self, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            self.tracker.revoke(each.topic, each.partition)
            self._paused.discard((each.topic, each.partition))
            self._committed.pop((each.topic, each.partition), None)
        self.revokes += 1
        self._wake.set()


def with_defaults(settings: Mapping[str, Any], prefetch: int, max_bytes: int) -> dict[str, Any]:
    """Ours below the user's; what correctness rests on above both. KIP-848 has its timeouts on the broker."""
    classic = {
        # That others join or leave is heard in the answer to a heartbeat, twice before partitions change hands. Its default
        # of three seconds is six without commits.
        "heartbeat.interval.ms": 1000,
    }
    decides = settings.get("group.protocol") != "consumer"
    return {
        **(classic if decides else {}),
        "queued.min.messages": max(prefetch, 1000),
        "fetch.queue.backoff.ms": 20,  # its default of a second is a second without jobs whenever that queue is full
        "queued.max.messages.kbytes": min(max(max_bytes // 1024 // 4, 1024), MOST_QUEUED_KB),
        **settings,
        **({"partition.assignment.strategy": "cooperative-sticky"} if decides else {}),
        "auto.offset.reset": "earliest",  # a new group would lose the jobs before any other beginning
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
    }


def _delivery(message: Message, tier: str, assignment: Assignment) -> Delivery:
    return Delivery(
        tier,
        assignment,
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        headers_of(message),
    )


def _behind(consumer: Consumer, assignment: Assignment) -> int:
    """Records between what may be committed and the partition's end, as librdkafka last heard of it: no question asked."""
    if assignment.committable is None:
        return 0
    place = TopicPartition(assignment.topic, assignment.partition)
    ends = consumer.get_watermark_offsets(place, cached=True)
    return max(0, ends[1] - assignment.committable) if ends is not None else 0


def _offsets(offsets: Mapping[tuple[str, int], int]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]


def _knock(consumer: Consumer, partitions: set[tuple[str, int]]) -> None:
    """Make librdkafka fetch what was resumed now.

    Its broker threads sleep for a second when there is nothing to fetch, and a resume does not wake them; a request
    does. This asks for something harmless (measured: 4 ms from the resume to the first record, instead of 900).
    """
    now = int(time.time() * 1000)
    with contextlib.suppress(KafkaException):
        consumer.offsets_for_times([TopicPartition(*key, now) for key in partitions], timeout=0.1)


def _names(partitions: list[TopicPartition]) -> str:
    return ", ".join(f"{each.topic}[{each.partition}]" for each in partitions)
