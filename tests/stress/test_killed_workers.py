"""Thousands of jobs, workers and a recorder that are killed again and again, and then the books must balance."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from pipeline import Pipeline, pipeline

from headrace.ledger import Ledger
from headrace.ledger.recorder import Recorder
from headrace.schemas import BatchClosed, BatchOpened

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

SLOW = {"latency_s": 0.5, "slots": 64}
TIERS = ("interactive", "standard", "bulk")


@pytest.fixture
def line(kafka: str, database_url: str) -> Iterator[Pipeline]:
    with pipeline(kafka, database_url) as made:
        yield made


@pytest.fixture
def recorder(line: Pipeline) -> Iterator[None]:
    stop = threading.Event()
    ledger = Ledger(line.database_url)
    made = Recorder(line.bootstrap, line.topics, ledger)
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join(30)
    ledger.close()


def send(line: Pipeline, count: int) -> set:
    """Every fiftieth record is no job, every hundredth fails."""
    line.control(BatchOpened(batch_id="b"))
    ids = set()
    for n in range(count):
        if n % 50 == 7:
            line.send(b"{no json", TIERS[n % 3], [("headrace-batch-id", b"b")], partition=n % 4)
        else:
            prompt = "fail:no_good" if n % 100 == 3 else f"prompt {n}"
            ids.add(line.submit(prompt, TIERS[n % 3], batch_id="b"))
    line.producer.flush(30)
    line.control(BatchClosed(batch_id="b", expected=count))
    return ids


def assert_the_books_balance(line: Pipeline, ids: set, count: int) -> None:
    assert line.rows().keys() == ids
    line.wait_for(lambda: line.ledger.batch("default", "b").complete, 30)
    counted = line.ledger.batch("default", "b")
    states = line.states()
    assert (counted.submitted, counted.rejected) == (len(ids), count - len(ids))
    assert {state: getattr(counted, state) for state in ("succeeded", "failed")} == dict(states)
    results = line.results(len(ids), seconds=60)
    assert results.keys() == ids
    assert all(copy == copies[0] for copies in results.values() for copy in copies)
    assert line.query("SELECT count(*) FROM attempts a JOIN jobs j USING (id) WHERE j.state < 2") == [(0,)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_workers_killed_at_random_leave_every_job_ended_once(
    line: Pipeline, recorder: None, protocol: str
) -> None:
    count = 6000
    workers = [line.start_process(SLOW, group_protocol=protocol) for _ in range(2)]
    ids = send(line, count)
    kills = 0
    until = time.monotonic() + 240
    while sum(map(line.states().get, ("succeeded", "failed"), (0, 0))) < len(ids):
        assert time.monotonic() < until, line.states()
        time.sleep(random.uniform(1.0, 3.0))
        victim = random.randrange(len(workers))
        if kills < 8:
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = line.start_process(SLOW, group_protocol=protocol)
            kills += 1
    line.wait_for(lambda: sum(map(line.lag, TIERS)) == 0, 60)
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    assert [worker.wait(60) for worker in workers] == [0, 0]

    assert kills
    assert_the_books_balance(line, ids, count)
    attempts = Counter(dict(line.query("SELECT attempt, count(*) FROM jobs GROUP BY 1")))
    # Nothing is run again but what was in flight: 64 places a worker.
    assert sum((attempt - 1) * number for attempt, number in attempts.items() if attempt) <= kills * 64
    assert line.query("SELECT count(*) FROM jobs WHERE error_code = 'engine_failure'") == [(0,)]


def test_a_worker_that_slept_past_its_session_touches_nothing_that_ended(
    line: Pipeline, recorder: None
) -> None:
    sleeper = line.start_process(SLOW)
    ids = send(line, 1500)
    line.wait_for(lambda: line.states()["succeeded"] > 100)
    os.kill(sleeper.pid, signal.SIGSTOP)
    other = line.start_process(SLOW)
    line.wait_for(lambda: sum(map(line.states().get, ("succeeded", "failed"), (0, 0))) == len(ids), 120)
    before = line.query("SELECT id, run, attempt, finished_at FROM jobs ORDER BY id")
    os.kill(sleeper.pid, signal.SIGCONT)
    time.sleep(5)
    assert line.query("SELECT id, run, attempt, finished_at FROM jobs ORDER BY id") == before
    line.wait_for(lambda: sum(map(line.lag, TIERS)) == 0, 60)
    for worker in (sleeper, other):
        worker.send_signal(signal.SIGTERM)
    assert [worker.wait(60) for worker in (sleeper, other)] == [0, 0]
    assert_the_books_balance(line, ids, 1500)
