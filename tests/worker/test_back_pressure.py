"""What a worker does when it holds all that it may."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from pipeline import Pipeline, RunningWorker
from standin import StandInEngine

from headrace.worker import consumer, default_tiers, outcomes
from headrace.worker import worker as worker_module
from headrace.worker.places import WAITING
from headrace.worker.publisher import Publisher

LONG = "long " * 400  # 2 kB, and its result more
SOME = 20_000  # bytes of results


def test_a_worker_that_is_full_for_a_moment_fetches_little_twice(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "FULL_FOR_S", 60.0)  # a slow machine's moments are long
    count, received = 1500, [0]

    def note(text: str) -> None:
        partitions = json.loads(text)["topics"].get(line.topics.jobs("standard"), {}).get("partitions", {})
        received[0] = max(received[0], sum(each["rxmsgs"] for each in partitions.values()))

    for n in range(count):
        line.submit(f"prompt {n}")
    line.flush()
    tiers = tuple(replace(tier, prefetch=128) for tier in default_tiers(line.topics.tiers))
    statistics = {"statistics.interval.ms": 100, "stats_cb": note}
    line.start_worker(lambda: StandInEngine(latency_s=0.001), tiers=tiers, kafka=statistics)
    line.wait_terminal(count)
    assert 0 < received[0] < 3 * count


def start_with_endless_jobs(
    line: Pipeline, count: int, engine: Callable[..., StandInEngine]
) -> RunningWorker:
    """A worker at its defaults that holds so many jobs, none of which ends."""
    for n in range(count):
        line.submit(f"prompt {n}")
    line.flush()
    running = line.start_worker(partial(engine, latency_s=1e9), max_in_flight=None, grace_s=0.0)
    line.wait_for(lambda: running.worker.status().held == count)
    return running


def test_by_default_an_engine_is_kept_full_however_many_slots_it_has(line: Pipeline) -> None:
    slots, count = 320, 400
    in_flight = slots + slots // 8 - 7  # of the places, 2% are kept for interactive jobs
    running = start_with_endless_jobs(line, count, partial(StandInEngine, slots=slots))
    line.wait_for(lambda: running.worker.status().in_flight == in_flight)
    assert running.worker.status().waiting["standard"] == count - in_flight


def test_an_engine_whose_cache_holds_few_sequences_has_few_jobs_waiting_in_it(line: Pipeline) -> None:
    """Who sends little waits behind those, whatever its turn."""

    class WithLittleMemory(StandInEngine):
        max_slots = 2048

    count, seats = 400, 40
    in_flight = seats + WAITING - 5  # of the places, 2% are kept for interactive jobs
    running = start_with_endless_jobs(line, count, partial(WithLittleMemory, slots=seats))
    line.wait_for(lambda: running.worker.status().in_flight == in_flight)
    assert running.worker.status().in_flight == in_flight


def test_results_that_wait_for_kafka_are_bounded_by_bytes_whether_new_or_stored(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, at_once = 100, 4
    send = Publisher._send
    monkeypatch.setattr(outcomes, "MOST_BYTES", SOME)
    monkeypatch.setattr(worker_module, "LOOKUPS_A_CALL", at_once)
    monkeypatch.setattr(worker_module, "ARRIVALS_A_TURN", at_once)
    monkeypatch.setattr(Publisher, "_send", lambda self: None)  # a broker that is away
    for n in range(count):
        line.submit(LONG + str(n))
    line.flush()

    first = line.start_worker(max_in_flight=at_once)
    line.wait_for(lambda: first.worker._outcomes.full and first.worker.status().unconfirmed >= 8)
    line.wait_for(lambda: first.worker.status().in_flight == first.worker.status().finishing == 0)
    assert len(first.engine.seen) * len(LONG) < SOME + 2 * at_once * len(LONG)
    monkeypatch.setattr(Publisher, "_send", send)
    line.wait_terminal(count)
    line.wait_for(lambda: line.lag() == 0)
    first.close()
    assert len(first.engine.seen) == count

    line.forget_offsets("standard")
    monkeypatch.setattr(Publisher, "_send", lambda self: None)
    second = line.start_worker()
    line.wait_for(lambda: second.worker._outcomes.unpublished_full and second.worker._lookups.idle)
    assert second.worker._outcomes.unconfirmed < count / 2
    monkeypatch.setattr(Publisher, "_send", send)
    line.wait_for(lambda: line.lag() == 0)
    second.close()
    assert second.engine.seen == []
    assert len(line.take(line.topics.results, 2 * count)) == 2 * count
