"""A pipeline for one test: topics of its own, a job table, and workers with the stand-in engine.

``python pipeline.py <json>`` is such a worker as a process of its own, for tests that kill it.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import apache_kafka
import crash_points
import psycopg
import recorders
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from standin import StandInEngine

from headrace.ledger import Ledger
from headrace.ledger.recorder import Recorder
from headrace.schemas import ControlMessage, JobResult, Topics, uuid7
from headrace.worker import Worker, WorkerConfig, default_tiers
from headrace.worker.health import HealthServer, loading

# A killed worker is noticed in two seconds instead of 45.
QUICK_GROUP = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 400, "log_level": 3}
# How long a test waits for what must come: it costs nothing where it comes, and a slow machine may take its time.
PATIENCE_S = 120.0
NOT_YET = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NON_EMPTY_GROUP,  # a member is leaving it
    KafkaError.NOT_LEADER_FOR_PARTITION,
}


@dataclass
class RunningWorker:
    """A worker on a thread of the test's process."""

    worker: Worker
    engines: list[StandInEngine]
    stop: threading.Event
    thread: threading.Thread
    failure: list[BaseException]
    health_port: int | None = None

    @property
    def engine(self) -> StandInEngine:
        """The engine it has now."""
        return self.engines[-1]

    def close(self) -> None:
        """Stop it cleanly and say if it failed."""
        self.stop.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the worker did not stop"
        if self.failure:
            raise self.failure[0]


@dataclass
class Pipeline:
    """What a test drives and looks at."""

    bootstrap: str
    database_url: str
    topics: Topics
    tmp: str = "/tmp"
    workers: list[RunningWorker] = field(default_factory=list)
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        # Idempotent: a record that is sent while the broker dies must not be there twice because of us.
        settings = {"bootstrap.servers": self.bootstrap, "linger.ms": 2, "log_level": 0}
        self.producer = Producer({**settings, "enable.idempotence": True})
        self.ledger = Ledger(self.database_url)

    # --- driving ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str = "hello",
        tier: str = "standard",
        headers: list[tuple[str, bytes]] | None = None,
        **fields: Any,
    ) -> UUID:
        """Send a job that names itself; returns its id."""
        id = uuid7()
        self.send({"job_id": str(id), "prompt": prompt, **fields}, tier, headers)
        return id

    def send(
        self,
        value: Mapping[str, Any] | bytes | None,
        tier: str = "standard",
        headers: list[tuple[str, bytes]] | None = None,
        key: bytes | None = None,
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """Send a record as it is; ``timestamp_ms`` is what its producer's clock says, 0 for now."""
        data = json.dumps(value).encode() if isinstance(value, Mapping) else value
        topic = self.topics.jobs(tier)
        self.producer.produce(
            topic,
            value=data,
            key=key,
            headers=headers or [],
            partition=partition,
            timestamp=timestamp_ms,
            on_delivery=self._sent,
        )
        self.producer.poll(0)

    def _sent(self, error: KafkaError | None, message: Message) -> None:
        assert error is None, error

    def flush(self) -> None:
        """Return once the broker has all that was sent."""
        assert self.producer.flush(PATIENCE_S) == 0, "the broker does not take what is sent"

    def control(self, message: ControlMessage) -> None:
        key, value, headers = message.encode()
        self.producer.produce(self.topics.control, key=key, value=value, headers=headers)
        self.flush()

    def start_worker(
        self,
        make: Callable[[], StandInEngine] = StandInEngine,
        *,
        health: HealthServer | None = None,
        **config: Any,
    ) -> RunningWorker:
        """A worker on a thread; ``make`` builds its engines. It is never killed, so nobody takes it for dead early.

        health: it closes that too.
        """
        engines: list[StandInEngine] = []

        def open_engine() -> StandInEngine:
            engines.append(make())
            return engines[-1]

        stop, failure = threading.Event(), []
        ledger = Ledger(self.database_url)
        told = {"alive_s": PATIENCE_S, **config, "kafka": {**_patient_group(), **config.get("kafka", {})}}
        worker = Worker(worker_config(self.bootstrap, self.topics, told), open_engine, ledger, health)

        def run() -> None:
            try:
                with ledger:
                    worker.run(stop)
            except BaseException as error:
                failure.append(error)
            finally:
                if health is not None:
                    health.close()

        thread = threading.Thread(target=run, name="worker")
        running = RunningWorker(worker, engines, stop, thread, failure, health.port if health else None)
        self.workers.append(running)
        thread.start()
        return running

    def start_process(
        self,
        engine: Mapping[str, Any] | None = None,
        *,
        role: str = "worker",
        crash: str | None = None,
        ledger: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> "subprocess.Popen[bytes]":
        """A worker or recorder as a process. engine, ledger: arguments of StandInEngine and Ledger; crash: see
        crash_points."""
        told = {
            "role": role,
            "crash": crash,
            "bootstrap": self.bootstrap,
            "database_url": self.database_url,
            "prefix": self.topics.prefix,
            "engine": dict(engine or {}),
            "ledger": dict(ledger or {}),
            "config": config,
        }
        # A SIGTERM that comes before the child listens for it waits until it does.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(told)], env={**os.environ, "PYTHONPATH": _root()}
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for running in self.workers:
            if running.thread.is_alive():
                running.close()
        self.ledger.close()

    # --- looking ------------------------------------------------------------------------------------------------------

    def rows(self) -> dict[UUID, str]:
        """State by id, of every row in the job table."""
        return dict(self.query("SELECT id, state::text FROM job_status"))

    def query(self, sql: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.database_url) as connection:
            return connection.execute(sql, values).fetchall()

    def states(self) -> Counter[str]:
        """How many jobs are in each state."""
        return Counter(self.rows().values())

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE_S, what: str = "") -> None:
        """Return once ``condition`` holds; fails after ``seconds``, or at once if a worker failed."""
        until = time.monotonic() + seconds
        while not condition():
            for running in self.workers:
                if running.failure:
                    raise running.failure[0]
            assert time.monotonic() < until, (
                what or f"not within {seconds:g} s; rows: {self._states_if_known()}"
            )
            time.sleep(0.05)

    def _states_if_known(self) -> object:
        """For messages: Postgres may be what is away."""
        try:
            return dict(self.states())
        except psycopg.Error as error:
            return f"unknown, {error}"

    def wait_until_steady(self, ask: Callable[[], object], seconds: float = 2.0) -> None:
        """Return once ``ask`` has given the same answer for so long."""
        last, since = ask(), time.monotonic()

        def is_steady() -> bool:
            nonlocal last, since
            if (now := ask()) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since >= seconds

        self.wait_for(is_steady)

    def wait_terminal(self, count: int, seconds: float = PATIENCE_S) -> None:
        """Return once so many jobs have ended."""
        self.flush()
        ended = ("succeeded", "failed", "cancelled", "expired")
        self.wait_for(lambda: sum(map(self.states().get, ended, (0,) * 4)) >= count, seconds)

    def results(self, count: int, seconds: float = PATIENCE_S) -> dict[UUID, list[JobResult]]:
        """The results topic from its beginning, by id, once it has ``count`` ids."""
        found: dict[UUID, list[JobResult]] = {}
        for message in self._read(self.topics.results, seconds):
            result = JobResult.decode(message.value())
            assert message.key() == str(result.id).encode()
            found.setdefault(result.id, []).append(result)
            if len(found) >= count:
                break
        return found

    def dead_letters(self, count: int, seconds: float = PATIENCE_S) -> list[Message]:
        """The dead-letter topic from its beginning, once it has ``count`` records."""
        return self.take(self.topics.dead, count, seconds)

    def take(self, topic: str, count: int, seconds: float = PATIENCE_S) -> list[Message]:
        """The first ``count`` records of a topic, or those that are there after ``seconds``."""
        return list(itertools.islice(self._read(topic, seconds), count))

    def _read(self, topic: str, seconds: float) -> Iterator[Message]:
        until = time.monotonic() + seconds
        with self._reader(topic) as (consumer, ends):
            consumer.assign([TopicPartition(topic, partition, low) for partition, (low, _) in ends.items()])
            while time.monotonic() < until:
                message = consumer.poll(0.1)
                if message is not None and message.error() is None:
                    yield message

    def everything(self, topic: str, seconds: float = PATIENCE_S) -> list[Message]:
        """All that the topic holds now."""
        found, until = [], time.monotonic() + seconds
        with self._reader(topic) as (consumer, ends):
            left = {partition for partition, (low, high) in ends.items() if low < high}
            consumer.assign([TopicPartition(topic, partition, ends[partition][0]) for partition in left])
            while left:
                assert time.monotonic() < until, f"{topic} is not read to its end within {seconds:g} s"
                if (message := consumer.poll(0.1)) is not None and message.error() is None:
                    found.append(message)
                    if message.offset() + 1 >= ends[message.partition()][1]:
                        left.discard(message.partition())
        return found

    @contextmanager
    def _reader(self, topic: str) -> Iterator[tuple[Consumer, dict[int, tuple[int, int]]]]:
        """A consumer in no group, and where each partition of the topic begins and ends now."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": f"test-{uuid4()}",
                "enable.partition.eof": True,
                **QUICK_GROUP,
            }
        )
        try:
            yield consumer, _ends(consumer, topic)
        finally:
            consumer.close()

    def forget_offsets(self, tier: str) -> None:
        """Make the tier's group start over; nobody may be in it."""
        group = WorkerConfig(self.bootstrap, self.topics).consumer(tier)["group.id"]
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        _patiently(lambda: admin.delete_consumer_groups([group])[group].result(PATIENCE_S))

    def lag(self, tier: str = "standard") -> int:
        """Records of the tier whose offset is not committed, those among them that have just been sent."""
        self.flush()
        with self._reader(self.topics.jobs(tier)) as (_, ends):
            committed = self.committed(tier)
            return sum(high - max(committed[partition], low) for partition, (low, high) in ends.items())

    def committed(self, tier: str = "standard") -> dict[int, int]:
        """The workers' offset in each partition of the tier, 0 where there is none."""
        topic, settings = self.topics.jobs(tier), WorkerConfig(self.bootstrap, self.topics).consumer(tier)
        consumer = Consumer({**settings, "log_level": 0})
        try:
            places = [TopicPartition(topic, partition) for partition in _partitions(consumer, topic)]
            offsets = _patiently(lambda: consumer.committed(places, timeout=PATIENCE_S))
            return {each.partition: max(each.offset, 0) for each in offsets}
        finally:
            consumer.close()


def health_server() -> HealthServer:
    """On any port, for a worker that is yet to come."""
    return HealthServer(0, lambda: loading("w", "stand-in"))


def _patient_group() -> dict[str, int]:
    """For a worker that is never killed. The embedded broker lets a group's first member in after half of the time."""
    embedded = apache_kafka.describe() == apache_kafka.TANSU
    return {**QUICK_GROUP, "session.timeout.ms": 6_000 if embedded else 45_000}


def _partitions(consumer: Consumer, topic: str) -> list[int]:
    return list(consumer.list_topics(topic, PATIENCE_S).topics[topic].partitions)


def _ends(consumer: Consumer, topic: str) -> dict[int, tuple[int, int]]:
    """Where each partition of the topic begins and ends now."""
    places = [TopicPartition(topic, partition) for partition in _partitions(consumer, topic)]
    told = {
        place.partition: _patiently(partial(consumer.get_watermark_offsets, place, PATIENCE_S))
        for place in places
    }
    return _read_to_the_end(consumer, topic, told) if apache_kafka.describe() == apache_kafka.TANSU else told


def _read_to_the_end(
    consumer: Consumer, topic: str, told: dict[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """What the embedded broker should have told: it takes a last batch of many records for one."""
    ends = {partition: (low, high) for partition, (low, high) in told.items() if low == high}
    consumer.assign(
        [TopicPartition(topic, partition, told[partition][1] - 1) for partition in told.keys() - ends]
    )
    until = time.monotonic() + PATIENCE_S
    while len(ends) < len(told):
        assert time.monotonic() < until, f"{topic} is not read to its end within {PATIENCE_S:g} s"
        message = consumer.poll(0.1)
        error = None if message is None else message.error()
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            ends[message.partition()] = told[message.partition()][0], message.offset()
    consumer.unassign()
    return ends


def _patiently(ask: Callable[[], Any]) -> Any:
    """An answer that a broker which has just been started may not have yet."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in NOT_YET or time.monotonic() > until:
                raise
            time.sleep(0.1)


@contextmanager
def recording(made: Pipeline) -> Iterator[None]:
    """A recorder while the block runs."""
    with recorders.running(Recorder(made.bootstrap, made.topics, made.ledger, kafka=QUICK_GROUP)):
        yield


@contextmanager
def pipeline(
    bootstrap: str,
    database_url: str,
    partitions: int = 4,
    largest: int | None = None,
    largest_result: int | None = None,
) -> Iterator[Pipeline]:
    """Topics of their own, and everything stopped at the end.

    largest: bytes of a record, instead of Kafka's 1 MB. largest_result: the same of the results topic alone.
    """
    topics = Topics(prefix=f"t{uuid4().hex[:12]}")

    def config(topic: str) -> dict[str, str]:
        most = largest_result if topic == topics.results and largest_result else largest
        return {**({} if most is None else {"max.message.bytes": str(most)}), **topics.config(topic)}

    apache_kafka.create_topics(bootstrap, topics.all, partitions, config)
    made = Pipeline(bootstrap, database_url, topics)
    try:
        yield made
    finally:
        made.close()


def worker_config(bootstrap: str, topics: Topics, config: Mapping[str, Any]) -> WorkerConfig:
    """config: fields of WorkerConfig, or ``prefetch`` for all tiers."""
    given = {"alive_s": 2.0, "grace_s": 5.0, "max_in_flight": 64, **config}
    kafka = {**QUICK_GROUP, **given.pop("kafka", {})}
    if given.get("group_protocol") == "consumer":
        kafka = {"log_level": 3}
    if prefetch := given.pop("prefetch", None):
        given["tiers"] = tuple(replace(tier, prefetch=prefetch) for tier in default_tiers(topics.tiers))
    return WorkerConfig(bootstrap, topics, kafka=kafka, **given)


def _root() -> str:
    return os.pathsep.join(
        [os.path.dirname(os.path.dirname(os.path.dirname(__file__))), os.path.dirname(__file__)]
    )


def main() -> None:
    apache_kafka.die_with_parent()
    told = json.loads(sys.argv[1])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    topics = Topics(prefix=told["prefix"])
    crash_points.arm(told["crash"])
    if told["role"] == "recorder":
        with Ledger(told["database_url"], **told["ledger"]) as ledger:
            Recorder(told["bootstrap"], topics, ledger, kafka=QUICK_GROUP).run(stop)
        return
    config = worker_config(told["bootstrap"], topics, told["config"])
    with Ledger(told["database_url"], **told["ledger"]) as ledger:
        Worker(config, lambda: StandInEngine(**told["engine"]), ledger).run(stop)


if __name__ == "__main__":
    main()
