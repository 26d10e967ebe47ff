"""The recorder, between a real broker and a real Postgres."""

import json
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import apache_kafka
import postgres
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from recorders import running
from rows import outcome, query
from waiting import eventually

from headrace.ledger import BatchProgress, JobRow, Ledger, recorder, upkeep
from headrace.ledger.recorder import Recorder
from headrace.schemas import (
    BatchClosed,
    BatchOpened,
    CancelJob,
    ControlMessage,
    JobState,
    Topics,
    parse_envelope,
    uuid7,
    wire,
)
from headrace.schemas import topics as names


@dataclass
class Line:
    """Topics of one test's own, and a ledger."""

    bootstrap: str
    ledger: Ledger
    topics: Topics = field(default_factory=lambda: Topics(prefix=f"rec-{secrets.token_hex(4)}"))

    def __post_init__(self) -> None:
        apache_kafka.create_topics(self.bootstrap, self.topics.all, partitions=2)
        self.producer = Producer({"bootstrap.servers": self.bootstrap})

    def send(self, value: Any, tier: str = "standard", topic: str | None = None, **headers: str) -> None:
        data = json.dumps(value).encode() if isinstance(value, dict) else value
        self.producer.produce(
            topic or self.topics.jobs(tier),
            value=data,
            headers=[(name, text.encode()) for name, text in headers.items()],
        )
        self.producer.flush(120)

    def control(self, *messages: ControlMessage) -> None:
        for message in messages:
            key, value, headers = message.encode()
            self.producer.produce(self.topics.control, key=key, value=value, headers=headers)
        self.producer.flush(120)

    @contextmanager
    def recorder(
        self, ledger: Ledger | None = None, kafka: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        quick = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500, **(kafka or {})}
        with running(Recorder(self.bootstrap, self.topics, ledger or self.ledger, kafka=quick)):
            yield

    def committed(self) -> int:
        """Offsets committed by the recorder's group, summed over its partitions."""
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": f"{self.topics.prefix}.recorder"}
        )
        wanted = [
            TopicPartition(topic, partition)
            for topic in (*map(self.topics.jobs, self.topics.tiers), self.topics.control)
            for partition in range(2)
        ]
        try:
            return sum(max(each.offset, 0) for each in consumer.committed(wanted, timeout=120))
        finally:
            consumer.close()


@pytest.fixture
def line(kafka: str, ledger: Ledger) -> Line:
    return Line(kafka, ledger)


def prompt(id: UUID | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": "hello",
        "batch_id": "b1",
        "tenant": "acme",
        **({"job_id": str(id)} if id else {}),
        **fields,
    }


def batch(line: Line, **wanted: int) -> BatchProgress | None:
    """The batch, once it has the counts wanted."""
    found = line.ledger.batch("acme", "b1")
    return found if found and all(getattr(found, name) == count for name, count in wanted.items()) else None


def test_jobs_of_every_tier_are_recorded_with_their_source(line: Line, database_url: str) -> None:
    ids = {tier: uuid7() for tier in line.topics.tiers}
    with line.recorder():
        for tier, id in ids.items():
            line.send(prompt(id, model="m", custom_id=tier), tier)
        eventually(lambda: batch(line, submitted=3, queued=3))
    stored = query(database_url, "SELECT id, tier, pool, model, custom_id, src_topic, src_offset FROM jobs")
    assert sorted(stored) == sorted(
        (id, tier, "default", "m", tier, line.topics.jobs(tier), 0) for tier, id in ids.items()
    )


def test_jobs_without_an_id_get_one_from_their_record(line: Line) -> None:
    line.send(prompt())
    line.send(prompt())
    with line.recorder():
        eventually(lambda: batch(line, submitted=2))


def test_records_that_cannot_be_parsed_count_against_the_batch_in_their_headers(line: Line) -> None:
    addressed = {names.TENANT: "acme", names.BATCH_ID: "b1", names.CUSTOM_ID: "line 7"}
    with line.recorder():
        line.control(BatchClosed(tenant="acme", batch_id="b1", expected=4))
        line.send(b"\xff\xfe not json", **addressed)
        line.send(b"[1, 2]", **addressed)
        line.send(b"", **addressed)
        line.send(prompt())
        eventually(lambda: batch(line, submitted=1, rejected=3))
    rejected = line.ledger.rejections("acme", "b1")
    assert {row.code for row in rejected} == {"invalid_encoding", "not_an_object", "empty_value"}
    assert {row.custom_id for row in rejected} == {"line 7"}


def test_batches_and_cancels_are_recorded_from_the_control_topic(line: Line) -> None:
    id = uuid7()
    with line.recorder():
        line.control(
            BatchOpened(tenant="acme", batch_id="b1"),
            CancelJob(tenant="acme", id=id),
            BatchClosed(tenant="acme", batch_id="b1", expected=1),
        )
        line.send(b"no message of ours", topic=line.topics.control)
        line.send(prompt(id))
        found = eventually(lambda: batch(line, submitted=1, expected=1))
        assert found.opened_at is not None
        row = JobRow(id, "acme", "standard", b"", "t", 0, 0, found.opened_at, batch_id="b1")
        eventually(
            lambda: line.ledger.lookup([row], "w1")[id].cancelled
        )  # from another partition, perhaps later


def test_the_same_id_with_other_content_is_rejected(line: Line) -> None:
    with line.recorder():
        line.send(prompt(job_id="mine"))
        eventually(lambda: batch(line, submitted=1))
        line.send(prompt(job_id="mine", prompt="something else"))
        line.send(prompt(job_id="mine"))
        eventually(lambda: batch(line, submitted=1, rejected=1))


def test_pools_are_found_by_their_topics_names(line: Line) -> None:
    pool = Topics(prefix=line.topics.prefix, pool="large")
    apache_kafka.create_topics(line.bootstrap, [pool.jobs("bulk")], partitions=1)
    line.send(prompt(), topic=pool.jobs("bulk"))
    with line.recorder():
        eventually(lambda: batch(line, submitted=1))
    (backlog,) = line.ledger.backlog()
    assert (backlog.pool, backlog.tier, backlog.queued) == ("large", "bulk", 1)


def test_a_late_recorder_finds_its_jobs_finished_and_changes_nothing(line: Line, database_url: str) -> None:
    row = JobRow(uuid7(), "acme", "standard", b"sha", "t", 0, 0, eventually(_now), batch_id="b1")
    line.ledger.finish([outcome(row, JobState.FAILED, attempt=0)])
    line.send(prompt(row.id, prompt="as the worker read it"))
    with line.recorder():
        eventually(lambda: line.committed() == 1)
    assert query(database_url, "SELECT state FROM job_status") == [("failed",)]


def test_a_recorder_goes_on_where_the_last_one_committed(line: Line) -> None:
    line.send(prompt())
    with line.recorder():
        eventually(lambda: line.committed() == 1)
    line.send(prompt())
    with line.recorder():
        eventually(lambda: line.committed() == 2)
    assert batch(line, submitted=2)


def test_two_recorders_share_the_work(line: Line) -> None:
    with line.recorder(), line.recorder():
        for number in range(40):
            line.send(prompt(custom_id=str(number)), line.topics.tiers[number % 3])
        eventually(lambda: batch(line, submitted=40))


def test_while_postgres_is_away_records_wait_and_none_is_lost(kafka: str) -> None:
    if not (server := postgres.server()).command:
        pytest.skip("the server named by HEADRACE_TEST_DATABASE_URL is not ours to stop")
    try:
        with postgres.clone(server) as url, Ledger(url, retry_for=0.2) as ledger:
            line = Line(kafka, ledger)
            # An operator's settings do not let offsets overtake the table either.
            with line.recorder(kafka={"enable.auto.commit": True, "auto.commit.interval.ms": 100}):
                line.send(prompt())
                eventually(lambda: line.committed() == 1)
                server.halt(signal.SIGQUIT)
                for _ in range(5):
                    line.send(prompt())
                time.sleep(1.5)
                assert line.committed() == 1
                server.start()
                eventually(lambda: line.committed() == 6)
            assert batch(line, submitted=6)
    finally:
        server.stop()


def test_upkeep_that_waits_holds_up_neither_recording_nor_a_clean_stop(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, let_go = threading.Event(), threading.Event()

    def wait_for_a_lock() -> None:
        waits.set()
        let_go.wait()

    monkeypatch.setattr(line.ledger, "ensure_partitions", wait_for_a_lock)
    monkeypatch.setattr(upkeep, "STOP_S", 0.1)
    try:
        with line.recorder():
            assert waits.wait(120)
            line.send(prompt())
            eventually(lambda: line.committed() == 1)
        assert batch(line, submitted=1)
    finally:
        let_go.set()


def test_what_people_write_never_breaks_the_recorder(line: Line) -> None:
    nasty = ["nul \0", "half \ud800", "x" * 100_000, "\\u0000"]
    with line.recorder():
        for text in nasty:
            line.send(prompt(custom_id=text[:200], model=text, prompt=text, metadata={text[:60]: text}))
        line.send(b'{"batch_id": "b1", "tenant": "acme", "n": NaN, "m": 1e999, "i": %s}' % (b"9" * 5000))
        line.send(b'{"batch_id": "b1", "tenant": "acme", "batch_id": "b1"}')
        line.send(wire.dump(prompt(deadline="not a time", custom_id={"a": [1]})))
        eventually(lambda: batch(line, submitted=7))


def test_a_record_that_a_defect_of_ours_cannot_read_is_rejected_while_the_others_land(
    line: Line, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(value: bytes, *rest: Any) -> Any:
        if b"defect" in value:
            raise RecursionError
        return parse_envelope(value, *rest)

    monkeypatch.setattr(recorder, "parse_envelope", parse)
    with line.recorder():
        line.send(prompt(prompt="defect"))
        line.send(prompt())
        eventually(lambda: batch(line, submitted=1))
        eventually(lambda: query(database_url, "SELECT code FROM rejections") == [("internal_error",)])


def _now() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC)
