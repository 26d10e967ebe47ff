"""Postgres or Kafka goes away for a while: what is finished waits, intake pauses, and nothing is lost."""

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import apache_kafka
import pipeline as pipeline_module
import postgres
import pytest
from pipeline import Pipeline, RunningWorker, pipeline
from standin import StandInEngine

from headrace.ledger import Ledger
from headrace.worker import default_tiers
from headrace.worker import worker as worker_module
from headrace.worker.consumer import BATCH, RESUME_BELOW, TierConsumer

PREFETCH = 64


@pytest.fixture
def our_postgres(postgres_server: postgres.Server) -> postgres.Server:
    """The job table's server, which is ours to stop."""
    if postgres_server.process is None:
        pytest.skip("the server is not ours to stop")
    return postgres_server


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What workers say before they take jobs; where Postgres is away they soon say so."""
    caplog.set_level("INFO")
    monkeypatch.setattr(pipeline_module, "Ledger", partial(Ledger, retry_for=0.5))
    return caplog


def small_tiers(line: Pipeline) -> tuple:
    return tuple(replace(tier, prefetch=PREFETCH) for tier in default_tiers(line.topics.tiers))


def assert_each_once(line: Pipeline, ids: set) -> None:
    assert line.rows() == dict.fromkeys(ids, "succeeded")
    results = line.results(len(ids))
    assert results.keys() == ids
    assert all(copy == copies[0] for copies in results.values() for copy in copies)


def submit_running(line: Pipeline, worker: RunningWorker, until: Path, count: int) -> set:
    """So many jobs that the engine has, and that do not end before there is a file ``until``."""
    ids = {line.submit(f"until:{until}") for _ in range(count)}
    line.flush()
    line.wait_for(lambda: {str(id) for id in ids} <= set(worker.engine.seen))
    return ids


def test_finished_results_wait_while_postgres_is_away(
    line: Pipeline, our_postgres: postgres.Server, tmp_path: Path
) -> None:
    worker = line.start_worker(lambda: StandInEngine(latency_s=0.3), tiers=small_tiers(line))
    ids = {line.submit(f"prompt {n}") for n in range(300)}
    line.wait_for(lambda: line.states()["succeeded"] > 30)
    running = submit_running(line, worker, tmp_path / "go on", 20)
    with our_postgres.away():
        ids |= {line.submit(f"prompt {n}") for n in range(600)}
        line.flush()
        (tmp_path / "go on").touch()
        line.wait_for(lambda: worker.worker.status().finishing >= len(running))
        # Nothing can be released meanwhile: what is held comes to rest only where the consumer is paused, or has all.
        line.wait_for(lambda: worker.worker.status().held >= RESUME_BELOW * PREFETCH)
        line.wait_until_steady(lambda: worker.worker.status().held)
        held = worker.worker.status().held
    ids |= running
    line.wait_terminal(len(ids))
    line.wait_for(lambda: line.lag() == 0)
    worker.close()

    assert held < PREFETCH + 1 + BATCH  # the prefetch, and one fetch that was under way
    assert_each_once(line, ids)
    assert len(worker.engine.seen) == len(ids)


def test_what_a_worker_cannot_write_before_it_stops_is_done_by_the_next_one(
    line: Pipeline,
    our_postgres: postgres.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for patience in ("FLUSH_S", "ABORT_S"):
        monkeypatch.setattr(worker_module, patience, 0.5)
    monkeypatch.setattr(pipeline_module, "Ledger", partial(Ledger, retry_for=0.5))
    first = line.start_worker(grace_s=0.5, alive_s=2.0)
    finished = submit_running(line, first, tmp_path / "go on", 5)
    running = submit_running(line, first, tmp_path / "stopped", 5)
    with our_postgres.away():
        (tmp_path / "go on").touch()
        line.wait_for(lambda: first.worker.status().finishing == len(finished))
        first.close()
    assert "Postgres does not take how 10 jobs ended" in caplog.text
    assert "let go" not in caplog.text
    assert line.states() == {"running": 10}

    (tmp_path / "stopped").touch()
    second = line.start_worker()
    line.wait_terminal(10)
    line.wait_for(lambda: line.lag() == 0)
    second.close()
    assert_each_once(line, finished | running)
    # An end that nobody could write down looks like a death: suspected once, each runs as usual.
    assert line.query("SELECT max(attempt), max(group_size) FROM attempts") == [(2, 0)]


def test_a_worker_whose_postgres_goes_away_while_the_model_is_loaded_waits_for_it(
    line: Pipeline, our_postgres: postgres.Server, log: pytest.LogCaptureFixture
) -> None:
    id = line.submit()
    line.flush()
    with ExitStack() as outage:
        worker = line.start_worker(lambda: outage.enter_context(our_postgres.away()) or StandInEngine())
        line.wait_for(lambda: "waiting for Postgres: connection" in log.text)
        assert "takes jobs" not in log.text
    line.wait_terminal(1)
    assert "takes jobs" in log.text
    worker.close()
    assert_each_once(line, {id})


def test_a_worker_that_is_stopped_while_it_waits_for_postgres_with_its_model_loaded_takes_nothing(
    line: Pipeline, our_postgres: postgres.Server, log: pytest.LogCaptureFixture
) -> None:
    with our_postgres.away():
        worker = line.start_worker()
        line.wait_for(lambda: "waiting for Postgres: connection" in log.text)
        worker.close()
    assert worker.engine.closed
    assert "takes jobs" not in log.text
    assert "could not sign off" not in log.text


def test_a_broker_that_is_killed_and_comes_back_loses_nothing(
    own_kafka: apache_kafka.Broker, database_url: str, tmp_path: Path
) -> None:
    with pipeline(own_kafka.bootstrap, database_url) as line:
        worker = line.start_worker(lambda: StandInEngine(latency_s=1.0, slots=32), tiers=small_tiers(line))
        ids = {line.submit(f"prompt {n}") for n in range(200)}
        line.wait_for(lambda: line.states()["succeeded"] > 20)
        running = submit_running(line, worker, tmp_path / "go on", 8)
        with own_kafka.away():
            (tmp_path / "go on").touch()
            line.wait_for(lambda: all(line.rows()[id] == "succeeded" for id in running))
            line.wait_for(lambda: worker.worker.status().unconfirmed >= len(running))
        ids |= running
        line.wait_terminal(len(ids))
        line.wait_for(lambda: line.lag() == 0)
        worker.close()

        assert_each_once(line, ids)
        assert len(worker.engine.seen) == len(ids)


def test_consumers_that_cannot_leave_their_groups_are_waited_for_together(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits, close = Clock(), [], TierConsumer.close

    def hang(consumer: TierConsumer, timeout: float) -> None:
        close(consumer, 0.0)
        waits.append(timeout)
        clock.hung += timeout

    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(TierConsumer, "close", hang)
    worker = line.start_worker()
    line.wait_for(lambda: worker.worker.status().partitions["bulk"] > 0)
    worker.close()
    assert len(waits) == 2 * len(line.topics.tiers)
    assert sum(waits) <= worker_module.CLOSE_S


class Clock:
    """Stands for the module ``time`` in the worker's loop."""

    def __init__(self) -> None:
        self.hung = 0.0

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() + self.hung
