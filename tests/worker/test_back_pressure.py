"""What a worker does when it holds all that it may."""

import json
from dataclasses import replace

from pipeline import Pipeline
from standin import StandInEngine

from headrace.worker import default_tiers


def test_a_worker_that_is_full_for_a_moment_fetches_little_twice(line: Pipeline) -> None:
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
