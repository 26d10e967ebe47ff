"""A process that dies at one step of the protocol, each by itself; and everything killed at once."""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import crash_points
import pytest
from pipeline import Pipeline, pipeline

from headrace.schemas import BatchClosed, BatchOpened, JobResult, Source, topics
from headrace.schemas.replay import repeat_headers
from headrace.store import open_store

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

TIERS = ("interactive", "standard", "bulk")
SLOW = {"latency_s": 0.3, "slots": 64}
OF_A_WORKER = [point for point in crash_points.POINTS if "recorder" not in point]


@pytest.fixture
def line(kafka: str, database_url: str) -> Iterator[Pipeline]:
    with pipeline(kafka, database_url) as made:
        yield made


def send(line: Pipeline, count: int) -> set:
    """Every tenth record is no job, every seventh fails."""
    line.control(BatchOpened(batch_id="b"))
    ids = set()
    for n in range(count):
        if n % 10 == 9:
            line.send(b"{no json %d" % n, TIERS[n % 3], [(topics.BATCH_ID, b"b")], partition=n % 4)
        else:
            prompt = "fail:no_good" if n % 7 == 3 else f"prompt {n}"
            ids.add(line.submit(prompt, TIERS[n % 3], batch_id="b"))
    line.producer.flush(30)
    line.control(BatchClosed(batch_id="b", expected=count))
    return ids


def assert_books_balance(line: Pipeline, ids: set, count: int) -> None:
    """Every job ended once, table and topic and counters agree, and nothing is left over."""
    line.wait_for(lambda: (batch := line.ledger.batch("default", "b")) and batch.complete, 120)
    line.wait_for(lambda: sum(map(line.lag, TIERS)) <= 0, 60)
    batch, states = line.ledger.batch("default", "b"), line.states()
    assert line.rows().keys() == ids
    assert (batch.submitted, batch.rejected) == (len(ids), count - len(ids))
    assert (batch.succeeded, batch.failed) == (states["succeeded"], states["failed"])
    assert line.query("SELECT count(*) FROM rejections WHERE NOT reopened") == [(batch.rejected,)]
    results = line.results(len(ids), seconds=60)
    assert results.keys() == ids
    for copies in results.values():
        assert all(copy == other for copy in copies for other in copies if copy.run == other.run)
    letters = {dict(letter.headers())[topics.DEAD_OFFSET] for letter in line.dead_letters(batch.rejected, 20)}
    assert len(letters) > 0
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL AND NOT died") == line.query(
        "SELECT count(*) FROM attempts JOIN jobs USING (id) WHERE ended_at IS NULL AND NOT died AND state > 1"
    )


@pytest.mark.parametrize("point", OF_A_WORKER, ids=lambda point: point.replace(" ", "-"))
def test_a_worker_that_dies_at_one_step_loses_and_repeats_nothing(
    line: Pipeline, point: str, tmp_path: Path
) -> None:
    config = {"max_result_bytes": 1, "result_store": str(tmp_path)} if "large" in point else {}
    recorder = line.start_process(role="recorder")
    count = 120
    ids = send(line, count)
    if point == "after a job was opened again":
        open_again(line, ids)
    doomed = line.start_process(SLOW, crash=point, **config)
    if point == "during a revoke":
        line.wait_for(lambda: line.states()["succeeded"] > 3, 60)
        line.start_process(SLOW)  # takes partitions from the first
    assert doomed.wait(90) == -signal.SIGKILL

    line.start_process(SLOW, **config)
    assert_books_balance(line, ids, count)
    assert recorder.poll() is None
    if config:
        assert_every_result_is_where_its_row_says(line, ids, tmp_path)


def assert_every_result_is_where_its_row_says(line: Pipeline, ids: set, directory: Path) -> None:
    store = open_store(str(directory))
    rows = line.query("SELECT id, uri, bytes, encode(sha256, 'hex') FROM results")
    read = {JobResult.decode(store.read(*reference)).id: id for id, *reference in rows}
    assert read == {id: id for id in ids}


def open_again(line: Pipeline, ids: set) -> None:
    """End the batch, then send one failed job's record again, as `headrace retry` does."""
    first = line.start_worker()
    line.wait_for(lambda: (batch := line.ledger.batch("default", "b")) and batch.complete, 60)
    line.wait_for(lambda: sum(map(line.lag, TIERS)) <= 0, 60)
    first.close()
    ((id, topic, partition, offset),) = line.query(
        "SELECT id, src_topic, src_partition, src_offset FROM jobs WHERE state = 3 ORDER BY id LIMIT 1"
    )
    (record,) = [
        message
        for message in line.take(topic, 10_000, 5)
        if (message.partition(), message.offset()) == (partition, offset)
    ]
    source = Source(topic, partition, offset, record.timestamp()[1], run=2)
    assert id in ids
    line.producer.produce(
        topic, record.value(), record.key(), headers=repeat_headers(record.headers(), source)
    )
    line.producer.flush(20)


def test_a_recorder_that_dies_between_write_and_commit_counts_nothing_twice(line: Pipeline) -> None:
    count = 300
    doomed = line.start_process(role="recorder", crash="after the recorder's write")
    ids = send(line, count)
    assert doomed.wait(90) == -signal.SIGKILL
    line.start_process(role="recorder")
    line.start_process(SLOW)
    assert_books_balance(line, ids, count)


def test_a_recorder_killed_again_and_again_counts_nothing_twice(line: Pipeline) -> None:
    count = 3000
    recorder = line.start_process(role="recorder")
    line.start_process({"latency_s": 0.5})
    ids = send(line, count)
    for _ in range(5):
        time.sleep(random.uniform(0.5, 2.0))
        recorder = again(line, recorder, lambda: line.start_process(role="recorder"))
    assert_books_balance(line, ids, count)


def test_everything_killed_at_once_goes_on_where_it_was(line: Pipeline, tmp_path: Path) -> None:
    count = 3000
    starts: list[Callable[[], subprocess.Popen]] = [
        lambda: line.start_process(SLOW),
        lambda: line.start_process(SLOW),
        lambda: line.start_process(role="recorder"),
    ]
    processes = [start() for start in starts]
    ids = send(line, count)
    for _ in range(3):
        time.sleep(random.uniform(2.0, 5.0))
        for process in processes:
            process.kill()
        processes = [again(line, process, start) for process, start in zip(processes, starts, strict=True)]
    assert_books_balance(line, ids, count)
    assert line.query("SELECT count(*) FROM jobs WHERE error_code = 'engine_failure'") == [(0,)]


def again(
    line: Pipeline, process: "subprocess.Popen[bytes]", start: "Callable[[], subprocess.Popen[bytes]]"
) -> "subprocess.Popen[bytes]":
    """Kill it, and start another."""
    process.kill()
    process.wait()
    return start()
