"""Following a batch with nothing but Kafka: its results, and the word that there are no more."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import Consumer, Message, TopicPartition

from headrace.client.announced import Announced
from headrace.client.heard import Heard
from headrace.client.readback import Place, place_of
from headrace.client.reading import PATIENCE_S, next_messages, partitions, properties, raise_if_final
from headrace.client.refusals import Refusals
from headrace.schemas import JobResult, Topics, UnreadableResult, dead_letter_source, named_key
from headrace.schemas import topics as names
from headrace.schemas.envelope import submission_of
from headrace.schemas.errors import ErrorCode, Outcome
from headrace.schemas.kafka_headers import headers_of

# Clocks differ: a worker's first result may bear an earlier time than the batch's opening.
_MARGIN_MS = int(timedelta(minutes=5).total_seconds() * 1000)
# Letters that no result goes with. A job that Postgres refused has a result, unless that was refused too.
_REJECTING = {
    code.value.encode(): code
    for code in ErrorCode
    if code.outcome is Outcome.REJECTED or code is ErrorCode.LEDGER_REJECTED
}


class Follower:
    """Reads three topics side by side: results, dead letters (records that never became jobs) and control messages.

    It belongs to no consumer group's rota: it reads every partition, commits nothing, and disturbs nobody.

    A line of the batch has ended when its job has a result, or when its record was rejected and no job of the batch stands
    for it. What was rejected of another sending than the one that the batch's count is of was sent again, and does not count.

    ids: jobs that are waited for besides, whatever the count says. refusals: learns which lines never became jobs; the answer
    to other content than was sent under an id is not given.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        topics: Topics,
        tenant: str,
        batch_id: str,
        ids: Iterable[UUID] = (),
        refusals: Refusals | None = None,
    ) -> None:
        self._heard = Heard()
        self._config = properties(kafka, self._heard, f"headrace-follow-{uuid4()}")
        self._topics = topics
        self._tenant = tenant
        self._address = tenant.encode(), batch_id.encode()
        self._announced = Announced(tenant, batch_id)
        self._runs: set[tuple[UUID, int]] = set()
        self._ids: set[UUID] = set()
        self._rejected: defaultdict[str | None, set[UUID | Place]] = defaultdict(set)  # by their sending
        self._left = set(ids)
        self._refusals = refusals or Refusals({}, [])

    def results(self, idle_timeout: float | None) -> Iterator[JobResult]:
        """New results until the batch is complete, or none came for ``idle_timeout`` seconds."""
        # Two consumers, one after the other: a broker answers a connection in turn, so that any question to it waits
        # half a second behind a fetch that finds nothing.
        with closing(Consumer(self._config)) as consumer, self._heard.explaining(consumer):
            control = self._announced.read(consumer, partitions(consumer, self._topics.control))
        with closing(Consumer(self._config)) as consumer:
            with self._heard.explaining(consumer):
                consumer.assign(control + self._ended_since_opening(consumer))
            heard = monotonic()
            while not self._complete and (idle_timeout is None or monotonic() - heard < idle_timeout):
                for message in next_messages(consumer):
                    result = self._take(message)
                    if result is not None:
                        heard = monotonic()
                        yield result

    @property
    def _complete(self) -> bool:
        expected = self._announced.expected
        return expected is not None and not self._left and len(self._ids) + self._lines_rejected() >= expected

    def _lines_rejected(self) -> int:
        """How many lines ended without a job: of the sending that counts, and of records that name none."""
        counted = self._announced.submission
        sendings = list(self._rejected) if counted is None else [None, counted]
        return len(set().union(*(self._rejected[name] for name in sendings)) - self._ids)

    def _ended_since_opening(self, consumer: Consumer) -> list[TopicPartition]:
        """Where results and dead letters of the batch may begin."""
        places = [
            *partitions(consumer, self._topics.results),
            *partitions(consumer, self._topics.dead),
        ]
        if self._announced.opened_ms is None:
            return places
        since = max(self._announced.opened_ms - _MARGIN_MS, 0)
        # Ends first: a record that comes between the two questions must not fall through.
        ends = {
            (at.topic, at.partition): consumer.get_watermark_offsets(at, timeout=PATIENCE_S)[1]
            for at in places
        }
        wanted = [TopicPartition(at.topic, at.partition, since) for at in places]
        found = consumer.offsets_for_times(wanted, timeout=PATIENCE_S)
        return [
            TopicPartition(
                at.topic, at.partition, at.offset if at.offset >= 0 else ends[at.topic, at.partition]
            )
            for at in found
        ]

    def _take(self, message: Message) -> JobResult | None:
        """Note what a record says of the batch; the result in it, if it is one and new."""
        error = message.error()
        if error is not None:
            raise_if_final(error)
            return None
        if message.topic() == self._topics.control:
            self._announced.take(message)
        elif self._is_ours(message):
            if message.topic() == self._topics.results:
                return self._take_result(message)
            self._take_dead_letter(message)
        return None

    def _take_result(self, message: Message) -> JobResult | None:
        try:
            result = JobResult.decode(message.value() or b"")
        except UnreadableResult:  # another version's: its job has ended all the same
            if (id := _key(message)) is not None:
                self._note_ended(id)
            return None
        if (result.id, result.run) in self._runs:
            return None
        self._runs.add((result.id, result.run))
        self._note_ended(result.id)
        return None if self._refusals.take_result(result.id, message) else result

    def _note_ended(self, id: UUID) -> None:
        self._ids.add(id)
        self._left.discard(id)

    def _take_dead_letter(self, message: Message) -> None:
        """A letter may be there twice, so what counts is the job that was not to be, else where its record came from.

        The client names all lines that it sends under an idempotency key. A duplicate of a job of the same batch is a line
        sent again, changed: the job that came first ends it. A second job of a name that stands in the line is a line of
        its own.
        """
        headers = headers_of(message)
        named = dict(headers)
        code = _REJECTING.get(named.get(names.DEAD_CODE) or b"")
        if code is None:
            return
        id = _key(message)
        as_sent = self._refusals.take_letter(id, code, message)
        job_id, sending = named.get(names.JOB_ID), submission_of(headers)
        duplicate = code is ErrorCode.DUPLICATE_JOB_ID
        if duplicate and (job_id or sending) and named.get(names.DEAD_SAME_BATCH) != b"false":
            if id is not None and as_sent:  # the former job's result may be gone from its topic
                self._note_ended(id)
            return
        source = dead_letter_source(headers)
        place = (source.topic, source.partition, source.offset) if source else place_of(message)
        line = named_key(self._tenant, job_id.decode("utf-8", "replace")) if job_id else None
        self._rejected[sending].add(line or place)
        if id is not None:
            self._left.discard(id)

    def _is_ours(self, message: Message) -> bool:
        headers = dict(headers_of(message))
        return (headers.get(names.TENANT, b"default"), headers.get(names.BATCH_ID)) == self._address


def _key(message: Message) -> UUID | None:
    """The id of the job that a record is of: the key of each result, and of a job as the client sends it."""
    try:
        return UUID((message.key() or b"").decode())
    except ValueError:
        return None
