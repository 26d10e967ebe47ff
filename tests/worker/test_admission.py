"""Shares between tiers, order inside one, promotion, reserves: on a clock of the test's own."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.admission import Admission, Tier, default_tiers


@dataclass(eq=False)
class Stub:
    tier: str = "bulk"
    cost: int = 100
    deadline_s: float | None = None
    waiting: bool = True
    name: str = ""


def admission(*tiers: Tier) -> Admission[Stub]:
    return Admission(tiers)


def fill(queue: Admission[Stub], tier: str, count: int, cost: int = 100) -> None:
    for _ in range(count):
        queue.put(Stub(tier, cost), tier, 0.0)


def drain(queue: Admission[Stub], tokens: int) -> Counter[str]:
    """Take one at a time until so many tokens are spent; tokens by tier."""
    spent: Counter[str] = Counter()
    while spent.total() < tokens and (taken := queue.take(1, 0.0)):
        spent[taken[0].tier] += taken[0].cost
    return spent


def test_saturated_tiers_get_their_weights_of_the_tokens() -> None:
    queue = admission(Tier("high", weight=3), Tier("low", weight=1))
    fill(queue, "high", 4000)
    fill(queue, "low", 4000, cost=50)
    spent = drain(queue, 200_000)
    assert spent["high"] / spent.total() == pytest.approx(0.75, abs=0.05)


def test_a_floor_holds_whatever_the_weights_say() -> None:
    queue = admission(Tier("high", weight=99), Tier("low", weight=1, floor=0.2))
    fill(queue, "high", 4000)
    fill(queue, "low", 4000)
    spent = drain(queue, 200_000)
    assert spent["low"] / spent.total() == pytest.approx(0.2, abs=0.02)


def test_a_quiet_tier_is_served_first_when_it_speaks() -> None:
    queue = admission(*default_tiers(("interactive", "standard", "bulk")))
    fill(queue, "bulk", 1000)
    drain(queue, 50_000)
    queue.put(Stub("interactive"), "interactive", 0.0)
    assert queue.take(1, 0.0)[0].tier == "interactive"


def test_an_idle_tier_saves_nothing_up() -> None:
    queue = admission(Tier("high", weight=1), Tier("low", weight=1))
    fill(queue, "low", 3000)
    drain(queue, 200_000)  # many rounds in which the high tier had nothing
    fill(queue, "high", 3000)
    spent = drain(queue, 100_000)
    assert spent["high"] / spent.total() == pytest.approx(0.5, abs=0.1)


def test_a_lone_tier_uses_everything_at_once() -> None:
    queue = admission(Tier("high", weight=99), Tier("low", weight=1))
    fill(queue, "low", 500)
    assert len(queue.take(500, 0.0)) == 500


def test_the_earliest_deadline_goes_first_inside_a_tier() -> None:
    queue = admission(Tier("bulk"))
    for name, deadline in (("none", None), ("late", 30.0), ("soon", 10.0), ("none too", None)):
        queue.put(Stub(name=name, deadline_s=deadline), "bulk", 0.0)
    assert [job.name for job in queue.take(4, 0.0)] == ["soon", "late", "none", "none too"]


def test_an_old_job_moves_a_tier_up() -> None:
    queue = admission(Tier("high", weight=1000), Tier("low", weight=1, promote_after_s=60))
    old = Stub("low")
    queue.put(old, "low", 0.0)
    fill(queue, "high", 400)
    drain(queue, 16_300)  # the round's tokens of the low tier do not reach for this job's cost
    assert old not in queue.take(10, 59.0)
    assert old in queue.take(300, 61.0)
    assert queue.waiting()["low"] == 0


def test_places_are_kept_free_for_the_tier_that_reserves_them() -> None:
    queue = admission(Tier("high", reserve=4), Tier("low"))
    fill(queue, "low", 100)
    assert len(queue.take(10, 0.0)) == 6
    fill(queue, "high", 100)
    assert [job.tier for job in queue.take(4, 0.0)] == ["high"] * 4


def test_what_must_not_run_any_more_is_skipped() -> None:
    queue = admission(Tier("bulk"))
    jobs = [Stub(name=str(n)) for n in range(4)]
    for job in jobs:
        queue.put(job, "bulk", 0.0)
    jobs[0].waiting = jobs[2].waiting = False
    assert queue.waiting() == {"bulk": 2}
    assert [job.name for job in queue.take(4, 0.0)] == ["1", "3"]


def test_memory_follows_what_waits_not_what_passed_by() -> None:
    queue = admission(Tier("bulk"))
    queue.put(Stub(name="patient"), "bulk", 0.0)  # hides everything behind it in the order of age
    for n in range(10_000):
        queue.put(Stub(deadline_s=float(n)), "bulk", 0.0)
        assert queue.take(1, 0.0)[0].name == ""
    assert len(queue._queues[0].by_age) < 3000


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 100_000)), max_size=60),
    st.lists(st.integers(0, 9), max_size=40),
)
def test_every_job_leaves_exactly_once(arrivals: list[tuple[str, int]], rooms: list[int]) -> None:
    queue = admission(
        Tier("a", 16, reserve=2), Tier("b", 4, promote_after_s=5), Tier("c", 1, promote_after_s=3)
    )
    taken: list[Stub] = []
    jobs = []
    for now, (tier, cost) in enumerate(arrivals):
        jobs.append(Stub(tier, cost))
        queue.put(jobs[-1], tier, float(now))
        if rooms:
            taken += queue.take(rooms[now % len(rooms)], float(now))
    while more := queue.take(5, 1000.0):
        taken += more
    assert len(taken) == len(set(taken)) == len(jobs)


def test_the_default_tiers_are_made_for_any_names() -> None:
    assert default_tiers(("only",)) == (Tier("only", weight=1.0, floor=0.05),)
    high, low = default_tiers(("x", "y"))
    assert (high.name, low.name) == ("x", "y")
    assert high.weight > low.weight
    assert (high.promote_after_s, low.reserve) == (None, 0)
