"""Postgres or Kafka goes away for a while: what is finished waits, intake pauses, and nothing is lost."""

from collections.abc import Iterator
from dataclasses import replace

import apache_kafka
import pytest
from pipeline import Pipeline, pipeline
from standin import StandInEngine

from headrace.worker import default_tiers


@pytest.fixture(scope="module")
def own_broker() -> Iterator[apache_kafka.Broker]:
    broker = apache_kafka.start()
    if broker.process is None or broker.kind == apache_kafka.TANSU:
        pytest.skip("needs a broker that keeps its data when it is killed")
    yield broker
    broker.stop()


def small_tiers(line: Pipeline) -> tuple:
    return tuple(replace(tier, prefetch=64) for tier in default_tiers(line.topics.tiers))


def assert_each_once(line: Pipeline, ids: set) -> None:
    assert line.rows() == dict.fromkeys(ids, "succeeded")
    results = line.results(len(ids))
    assert results.keys() == ids
    assert all(copy == copies[0] for copies in results.values() for copy in copies)


def test_finished_results_wait_while_postgres_is_away(line: Pipeline, postgres_server: object) -> None:
    if postgres_server.process is None:  # type: ignore[attr-defined]
        pytest.skip("the server is not ours to stop")
    worker = line.start_worker(lambda: StandInEngine(latency_s=0.3), tiers=small_tiers(line))
    ids = {line.submit(f"prompt {n}") for n in range(300)}
    line.producer.flush(10)
    line.wait_for(lambda: line.states()["succeeded"] > 30)
    postgres_server.halt()  # type: ignore[attr-defined]
    ids |= {line.submit(f"prompt {n}") for n in range(300)}
    line.producer.flush(10)
    line.wait_for(lambda: worker.worker.status().finishing > 0)
    line.wait_for(lambda: worker.worker.status().held >= 64)
    held = worker.worker.status().held
    postgres_server.start()  # type: ignore[attr-defined]
    line.wait_terminal(600)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()

    assert held < 64 + 512  # the prefetch, and one fetch that was under way
    assert_each_once(line, ids)
    assert len(worker.engine.seen) == 600


def test_a_broker_that_is_killed_and_comes_back_loses_nothing(
    own_broker: apache_kafka.Broker, database_url: str
) -> None:
    with pipeline(own_broker.bootstrap, database_url) as line:
        worker = line.start_worker(lambda: StandInEngine(latency_s=1.0, slots=32), tiers=small_tiers(line))
        ids = {line.submit(f"prompt {n}") for n in range(200)}
        line.producer.flush(10)
        line.wait_for(lambda: line.states()["succeeded"] > 20)
        own_broker.kill()
        before = line.states()["succeeded"]
        line.wait_for(lambda: line.states()["succeeded"] > before and worker.worker.status().unconfirmed > 0)
        own_broker.restart()
        line.wait_terminal(200, seconds=60)
        line.wait_for(lambda: line.lag() == 0, seconds=60)
        worker.close()

        assert_each_once(line, ids)
        assert len(worker.engine.seen) == 200
