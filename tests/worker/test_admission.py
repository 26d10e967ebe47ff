"""Shares between tiers, order inside one, promotion, reserves, limits: on a clock of the test's own."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_job import StubJob

from headrace.worker.admission import AHEAD, ROUND_TOKENS, Admission
from headrace.worker.tiers import Tier, default_tiers, shares

PLACES = 256


def admission(*tiers: Tier, places: int = PLACES) -> Admission[StubJob]:
    return Admission(tiers, places)


def fill(queue: Admission[StubJob], tier: str, count: int, cost: int = 100, tenant: str = "default") -> None:
    for _ in range(count):
        queue.put(StubJob(tier, cost, tenant), 0.0)


def drain(queue: Admission[StubJob], tokens: int) -> Counter[str]:
    """Run one at a time until so many tokens are spent; tokens by tier."""
    spent: Counter[str] = Counter()
    while spent.total() < tokens and (taken := queue.take(0.0, 1)):
        spent[taken[0].tier] += taken[0].cost
        queue.release(taken[0])
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
    queue.put(StubJob("interactive"), 0.0)
    assert queue.take(0.0)[0].tier == "interactive"


def test_an_idle_tier_saves_nothing_up() -> None:
    queue = admission(Tier("high", weight=1), Tier("low", weight=1))
    fill(queue, "low", 3000)
    drain(queue, 200_000)  # many rounds in which the high tier had nothing
    fill(queue, "high", 3000)
    spent = drain(queue, 100_000)
    assert spent["high"] / spent.total() == pytest.approx(0.5, abs=0.1)


def test_a_lone_tier_uses_everything_at_once() -> None:
    queue = admission(Tier("high", weight=99), Tier("low", weight=1), places=500)
    fill(queue, "low", 500)
    assert len(queue.take(0.0, 500)) == 500


def test_a_job_larger_than_its_tier_s_tokens_of_many_rounds_still_goes() -> None:
    queue = admission(Tier("high", weight=1), Tier("low", weight=1e-6))
    queue.put(StubJob("low", cost=10**9), 0.0)
    assert len(queue.take(0.0, 1)) == 1


def test_an_old_job_moves_a_tier_up_and_runs_as_one_of_it() -> None:
    queue = admission(Tier("high", weight=1000), Tier("low", weight=1, promote_after_s=60))
    old = StubJob("low")
    queue.put(old, 0.0)
    fill(queue, "high", 400)
    drain(queue, ROUND_TOKENS - 100)  # the round's tokens of the low tier do not reach for this job's cost
    assert old not in queue.take(59.0, 10)
    assert queue.rank(old) == 1
    assert old in queue.take(61.0, 300)
    assert queue.rank(old) == 0
    assert queue.waiting()["low"] == 0
    queue.release(old)
    assert queue.rank(old) == 1


def test_a_low_tier_s_turn_is_its_turn_in_the_engine_too() -> None:
    queue = admission(Tier("high", weight=3), Tier("low", weight=1))
    fill(queue, "low", 10)
    (alone,) = queue.take(0.0, 1)
    fill(queue, "high", 1000)
    beside = [job for job in queue.take(0.0) if job.tier == "low"]
    assert queue.rank(alone) == 1, "nobody higher waited: whoever comes later goes before it"
    assert beside
    assert {queue.rank(job) for job in beside} == {0}


def test_places_are_kept_free_for_the_tier_that_reserves_them() -> None:
    queue = admission(Tier("high", reserve=0.4), Tier("low"), places=10)
    fill(queue, "low", 100)
    assert len(queue.take(0.0, 10)) == 6
    fill(queue, "high", 100)
    assert [job.tier for job in queue.take(0.0, 4)] == ["high"] * 4


def test_places_come_and_go_and_with_them_what_is_reserved() -> None:
    queue = admission(Tier("high", reserve=0.5), Tier("low"), places=100)
    fill(queue, "low", 200)
    running = queue.take(0.0)
    assert len(running) == 50
    queue.resize(40)
    assert queue.take(0.0) == []
    for job in running[:31]:
        queue.release(job)
    assert len(queue.take(0.0)) == 1  # 20 of 40 are free for it, and 19 run
    queue.resize(160)
    assert len(queue.take(0.0)) == 60


def test_a_tier_that_uses_its_reserve_does_not_take_the_others_turn() -> None:
    """Places come free one at a time; a reserve counted from the free places would shut the low tier out for good."""
    queue = admission(Tier("high", reserve=0.4), Tier("low"), places=10)
    running = []
    fill(queue, "high", 2000, cost=1000)
    fill(queue, "low", 2000, cost=1000)
    running += queue.take(0.0, 10)
    spent: Counter[str] = Counter()
    for _ in range(1500):
        queue.release(running.pop(0))
        (job,) = queue.take(0.0, 1)
        spent[job.tier] += 1
        running.append(job)
    assert spent["low"] / 1500 == pytest.approx(0.5, abs=0.1)


def test_a_tier_that_may_preempt_needs_no_place_that_a_lower_one_holds() -> None:
    low = Tier("low")
    for high in (Tier("high"), Tier("high", preempts=False)):
        queue = admission(high, low, places=10)
        fill(queue, "low", 100)
        assert len(queue.take(0.0)) == 10
        fill(queue, "high", 100)
        assert len(queue.take(0.0)) == (10 if high.preempts else 0)


def test_a_tier_that_may_preempt_goes_beyond_the_places_only_so_far_ahead_of_the_others() -> None:
    queue = admission(Tier("high"), Tier("low"), places=100)
    fill(queue, "low", 500, cost=1000)
    running = queue.take(0.0)
    assert len(running) == 100
    fill(queue, "high", 500, cost=1000)
    ahead = queue.take(0.0)
    assert {job.tier for job in ahead} == {"high"}
    assert AHEAD * ROUND_TOKENS / 2 <= 1000 * len(ahead) <= (AHEAD + 2) * ROUND_TOKENS / 2
    for job in [*running, *ahead]:
        queue.release(job)
    assert Counter(job.tier for job in queue.take(0.0))["low"] >= len(ahead) / 2, (
        "now it is the low tier's turn"
    )


def test_a_lone_place_is_anybody_s() -> None:
    queue = admission(Tier("high", reserve=0.5), Tier("low"), places=1)
    fill(queue, "low", 1)
    assert len(queue.take(0.0, 1)) == 1


def test_a_tenant_has_no_more_in_flight_than_its_tier_s_limit_and_others_go_on() -> None:
    queue = admission(Tier("bulk", tenant_limit=3))
    fill(queue, "bulk", 50, tenant="loud")
    fill(queue, "bulk", 5, tenant="quiet")
    taken = queue.take(0.0)
    assert Counter(job.tenant for job in taken) == {"loud": 3, "quiet": 3}
    assert queue.take(0.0) == []
    queue.release(next(job for job in taken if job.tenant == "loud"))
    assert [job.tenant for job in queue.take(0.0)] == ["loud"]


def test_promotion_is_no_way_around_a_tenant_s_limit() -> None:
    queue = admission(Tier("high"), Tier("low", promote_after_s=10, tenant_limit=2))
    fill(queue, "low", 20)
    taken = queue.take(0.0, 1)
    fill(queue, "high", 3)
    taken += queue.take(60.0)  # all have been promoted by now
    assert Counter(job.tier for job in taken) == {"high": 3, "low": 2}
    assert queue.waiting() == {"high": 18, "low": 0}


def test_a_job_that_was_never_taken_may_be_released() -> None:
    queue = admission(Tier("bulk", tenant_limit=1))
    queue.release(StubJob())
    fill(queue, "bulk", 2)
    assert len(queue.take(0.0, 2)) == 1


def test_what_must_not_run_any_more_is_skipped() -> None:
    queue = admission(Tier("bulk"))
    jobs = [StubJob(name=str(n)) for n in range(4)]
    for job in jobs:
        queue.put(job, 0.0)
    jobs[0].waiting = jobs[2].waiting = False
    assert queue.waiting() == {"bulk": 2}
    assert [job.name for job in queue.take(0.0, 4)] == ["1", "3"]


tiers_of_three = st.tuples(
    *(
        st.builds(
            Tier,
            name=st.just(name),
            weight=st.floats(0.01, 100.0),
            floor=st.sampled_from([0.0, 0.1, 0.3]),
            reserve=st.sampled_from([0.0, 0.1, 0.3]),
            promote_after_s=st.sampled_from([1.0, 3.0, 5.0, 1e9]),
            preempts=st.booleans(),
            tenant_limit=st.sampled_from([None, 1, 4]),
        )
        for name in ("a", "b", "c")
    )
)


@given(
    tiers_of_three,
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100_000), st.sampled_from("xyz")), max_size=60),
    st.integers(10, 40),
    st.integers(0, 2**32),
)
def test_every_job_leaves_exactly_once_and_no_limit_is_passed(
    tiers: tuple[Tier, ...], arrivals: list[tuple[str, int, str]], places: int, seed: int
) -> None:
    chance = random.Random(seed)
    queue = admission(*tiers, places=places)
    left: list[StubJob] = []
    running: list[StubJob] = []
    now = 0.0

    def turn() -> None:
        taken = queue.take(now)
        running.extend(taken)
        left.extend(taken)
        for tier in tiers:
            assert sum(job.tier == tier.name for job in running) <= len(tiers) * places
            owned = Counter(job.tenant for job in running if job.tier == tier.name)
            assert max(owned.values(), default=0) <= (tier.tenant_limit or places)
        for job in chance.sample(running, chance.randint(0, len(running))):
            running.remove(job)
            queue.release(job)

    for tier, cost, tenant in arrivals:
        queue.put(StubJob(tier, cost, tenant), now)
        if chance.random() < 0.5:
            turn()
        now += 1.0
    for _ in range(5000):
        if len(left) == len(arrivals):
            break
        turn()
    assert len(left) == len(set(left)) == len(arrivals)


@settings(deadline=None, max_examples=50)
@given(
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10)),
    st.tuples(*[st.sampled_from([0.0, 0.1, 0.3])] * 3),
    st.tuples(*[st.integers(50, 1000)] * 3),
)
def test_saturated_tiers_are_within_a_round_and_a_job_of_their_shares(
    weights: tuple[float, ...], floors: tuple[float, ...], costs: tuple[int, ...]
) -> None:
    tiers = [Tier(name, weight, floor) for name, weight, floor in zip("abc", weights, floors, strict=True)]
    queue = admission(*tiers)
    rounds = 4
    for tier, share, cost in zip(tiers, shares(tiers), costs, strict=True):
        fill(queue, tier.name, int((rounds + 2) * share * ROUND_TOKENS / cost) + 2, cost)
    spent = drain(queue, rounds * ROUND_TOKENS)
    for tier, share, cost in zip(tiers, shares(tiers), costs, strict=True):
        assert abs(spent[tier.name] - share * spent.total()) <= share * ROUND_TOKENS + cost + max(costs)
