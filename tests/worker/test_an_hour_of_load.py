"""An hour of load on a simulated clock: places that work at a constant speed, jobs that arrive, admission between them."""

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from stub_job import StubJob

from headrace.worker.admission import Admission
from headrace.worker.tiers import Tier, default_tiers, shares

HOUR = 3600.0
PLACES = 64
SPEED = 8000.0  # tokens a second, all places together
PREFETCH = 200  # jobs of a saturated tier that are known at a time
TIERS = default_tiers(("interactive", "standard", "bulk"))


@dataclass
class Load:
    """What happened. waits: seconds from arrival to start. tokens: served in each minute."""

    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits_of: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    most_of_one_tenant: Counter[tuple[str, str]] = field(default_factory=Counter)

    def served(self) -> Counter[str]:
        return Counter({name: minutes.total() for name, minutes in self.tokens.items()})

    def share(self, name: str) -> float:
        return self.served()[name] / self.served().total()


def hour_of(
    tiers: Iterable[Tier], saturated: dict[str, list[str]], arrivals: Iterable[tuple[float, StubJob]]
) -> Load:
    """saturated: for each such tier, its tenants, who always have PREFETCH jobs waiting in all. arrivals: by time."""
    tiers = tuple(tiers)
    admission: Admission[StubJob] = Admission(tiers, PLACES)
    chance, load = random.Random(0), Load()
    since: dict[StubJob, float] = {}
    running: list[tuple[float, int, StubJob]] = []
    in_flight: Counter[tuple[str, str]] = Counter()
    numbers, coming = itertools.count(), iter(arrivals)
    waiting = dict.fromkeys(saturated, 0)
    upcoming = next(coming, None)
    now = 0.0

    def arrive(job: StubJob) -> None:
        since[job] = now
        admission.put(job, now)

    def note_wait(job: StubJob, at: float) -> None:
        load.waits[job.tier].append(now - at)
        load.waits_of[job.tier, job.tenant].append(now - at)

    while now < HOUR:
        for name, tenants in saturated.items():
            while waiting[name] < PREFETCH:
                arrive(StubJob(name, chance.randint(100, 1500), chance.choice(tenants)))
                waiting[name] += 1
        for job in admission.take(PLACES - len(running), now):
            heapq.heappush(running, (now + job.cost * PLACES / SPEED, next(numbers), job))
            note_wait(job, since.pop(job))
            load.tokens[job.tier][int(now // 60)] += job.cost
            owner = (job.tier, job.tenant)
            in_flight[owner] += 1
            load.most_of_one_tenant[owner] = max(load.most_of_one_tenant[owner], in_flight[owner])
            if job.tier in waiting:
                waiting[job.tier] -= 1
        ends = running[0][0] if running else math.inf
        if upcoming is not None and upcoming[0] <= ends:
            now = upcoming[0]
            arrive(upcoming[1])
            upcoming = next(coming, None)
            continue
        now, _, job = heapq.heappop(running)
        in_flight[job.tier, job.tenant] -= 1
        admission.release(job)
    for job, at in since.items():  # those that still wait count as well
        note_wait(job, at)
    return load


def poisson(tier: str, a_second: float, tenant: str = "default") -> list[tuple[float, StubJob]]:
    chance, now, arrivals = random.Random(1), 0.0, []
    while (now := now + chance.expovariate(a_second)) < HOUR:
        arrivals.append((now, StubJob(tier, chance.randint(100, 1500), tenant)))
    return arrivals


def test_saturated_tiers_get_their_shares_and_none_starves_in_any_minute() -> None:
    load = hour_of(TIERS, {tier.name: ["t"] for tier in TIERS}, [])
    for tier, share in zip(TIERS, shares(TIERS), strict=True):
        assert load.share(tier.name) == pytest.approx(share, rel=0.05)
        in_each = [load.tokens[tier.name][minute] for minute in range(60)]
        assert min(in_each) > 0.6 * share * 60 * SPEED, f"{tier.name} starved for a minute"


def test_a_floor_is_seen_in_the_shares_whatever_the_weights() -> None:
    tiers = [replace(tier, weight=weight) for tier, weight in zip(TIERS, (1e6, 1e3, 1.0), strict=True)]
    tiers[2] = replace(tiers[2], floor=0.15)
    load = hour_of(tiers, {tier.name: ["t"] for tier in tiers}, [])
    assert load.share("bulk") == pytest.approx(0.15, rel=0.05)
    assert load.share("standard") == pytest.approx(0.05, rel=0.1)


def test_a_quiet_interactive_tier_starts_at_once_above_saturated_ones() -> None:
    load = hour_of(TIERS, {"standard": ["t"], "bulk": ["t"]}, poisson("interactive", 1.0))
    waits = sorted(load.waits["interactive"])
    assert len(waits) > 3000
    assert waits[len(waits) * 99 // 100] < 1.0, "64 places end 10 jobs a second"
    assert load.share("bulk") / load.share("standard") == pytest.approx(0.25, rel=0.1)


def test_what_nobody_else_wants_goes_to_bulk() -> None:
    load = hour_of(TIERS, {"bulk": ["t"]}, poisson("interactive", 1.0))
    assert load.served().total() > 0.97 * HOUR * SPEED
    assert load.share("bulk") > 0.85


@pytest.mark.parametrize(("patience", "longest"), [(300.0, 700.0), (math.inf, math.inf)])
def test_promotion_bounds_the_wait_where_weights_alone_would_starve(patience: float, longest: float) -> None:
    tiers = (Tier("high", weight=1.0), Tier("low", weight=1e-6, promote_after_s=patience))
    load = hour_of(tiers, {"high": ["t"]}, poisson("low", 0.5))
    worst = max(load.waits["low"])
    assert worst < longest
    assert (worst > 3000.0) == (patience == math.inf), (
        "without promotion the first to come waits for the hour"
    )


def test_a_flood_of_one_tenant_does_not_hold_up_another_of_its_tier() -> None:
    load = hour_of(TIERS, {"bulk": ["loud"]}, poisson("bulk", 0.5, tenant="calm"))
    calm = sorted(load.waits_of["bulk", "calm"])
    assert len(calm) > 1500
    assert calm[len(calm) * 99 // 100] < 5.0
    assert sum(load.waits_of["bulk", "loud"]) / len(load.waits_of["bulk", "loud"]) > 15.0
    assert load.served().total() > 0.97 * HOUR * SPEED


def test_a_tenant_s_limit_holds_for_the_hour_and_leaves_places_to_others() -> None:
    limited = [*TIERS[:2], replace(TIERS[2], tenant_limit=20)]
    load = hour_of(limited, {"bulk": ["loud"]}, poisson("bulk", 5.0, tenant="calm"))
    assert load.most_of_one_tenant["bulk", "loud"] == 20
    assert load.most_of_one_tenant["bulk", "calm"] == 20
    assert load.served().total() < 0.7 * HOUR * SPEED, "two tenants of 20 places each cannot fill 64"


def test_a_reserve_shortens_the_wait_of_a_burst() -> None:
    bursts = [(at, StubJob("interactive", 500)) for at in range(60, 3600, 60) for _ in range(6)]
    longest = {}
    for reserve in (0.02, 0.1):
        tiers = (replace(TIERS[0], reserve=reserve), *TIERS[1:])
        longest[reserve] = max(hour_of(tiers, {"bulk": ["t"]}, bursts).waits["interactive"])
    assert longest[0.1] == 0.0
    assert longest[0.02] > 0.0
