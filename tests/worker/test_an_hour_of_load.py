"""An hour of load on a simulated clock: jobs that arrive, admission, and an engine of so many slots behind it."""

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
SLOTS = 64
IN_FLIGHT = 80
SPEED = 8000.0  # tokens a second, all slots together
PREFETCH = 200  # jobs of a saturated tier that are known at a time
TIERS = default_tiers(("interactive", "standard", "bulk"))


class SimulatedEngine:
    """Slots that each work at a constant speed; lower ranks go first and push higher ones back, who lose nothing."""

    def __init__(self) -> None:
        self._seated: dict[StubJob, tuple[int, float]] = {}  # rank, when it ends
        self._waiting: list[tuple[int, int, StubJob, float]] = []  # rank, number, job, seconds left
        self._ends: list[tuple[float, int, StubJob]] = []
        self._numbers = itertools.count()

    def add(self, job: StubJob, rank: int, now: float) -> list[StubJob]:
        """Returns who is seated by that."""
        if len(self._seated) == SLOTS:
            last = max(self._seated, key=lambda each: self._seated[each])
            if self._seated[last][0] > rank:
                displaced, end = self._seated.pop(last)
                heapq.heappush(self._waiting, (displaced, next(self._numbers), last, end - now))
        heapq.heappush(self._waiting, (rank, next(self._numbers), job, job.cost * SLOTS / SPEED))
        return self._seat(now)

    @property
    def next_end(self) -> float:
        while self._ends and self._seated.get(self._ends[0][2], (0, -1.0))[1] != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def end_next(self) -> tuple[StubJob, list[StubJob]]:
        """The job that ends at ``next_end``, and who is seated by that."""
        now, _, job = heapq.heappop(self._ends)
        del self._seated[job]
        return job, self._seat(now)

    def _seat(self, now: float) -> list[StubJob]:
        seated = []
        while self._waiting and len(self._seated) < SLOTS:
            rank, number, job, left = heapq.heappop(self._waiting)
            self._seated[job] = (rank, now + left)
            heapq.heappush(self._ends, (now + left, number, job))
            seated.append(job)
        return seated


@dataclass
class Load:
    """What happened. waits: seconds from arrival to a slot, by tier and by tenant. tokens: finished in each minute."""

    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits_of: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    most_of_one_tenant: Counter[tuple[str, str]] = field(default_factory=Counter)

    def served(self) -> Counter[str]:
        return Counter({name: minutes.total() for name, minutes in self.tokens.items()})

    def share(self, name: str) -> float:
        return self.served()[name] / self.served().total()


class Hour:
    """saturated: tiers that always have PREFETCH jobs waiting, of this tenant. arrivals: the other jobs, by time."""

    def __init__(
        self,
        tiers: Iterable[Tier],
        saturated: dict[str, list[str]],
        arrivals: Iterable[tuple[float, StubJob]],
    ) -> None:
        self.admission: Admission[StubJob] = Admission(tuple(tiers), IN_FLIGHT)
        self.engine, self.load, self.now = SimulatedEngine(), Load(), 0.0
        self.saturated, self.arrivals = saturated, iter(arrivals)
        self.chance = random.Random(0)
        self.since: dict[StubJob, float] = {}
        self.known: Counter[tuple[str, str]] = Counter()
        self.in_flight: Counter[tuple[str, str]] = Counter()

    def run(self) -> Load:
        upcoming = next(self.arrivals, None)
        while self.now < HOUR:
            self._refill()
            for job in self.admission.take(self.now):
                self._start(job)
            arrives = math.inf if upcoming is None else upcoming[0]
            self.now = min(arrives, self.engine.next_end)
            if upcoming is not None and self.now == arrives:
                self._arrive(upcoming[1])
                upcoming = next(self.arrivals, None)
            else:
                self._end()
        for job in list(self.since):  # those that still wait count as well
            self._seated(job)
        return self.load

    def _refill(self) -> None:
        for name, tenant in self.saturated.items():
            for _ in range(PREFETCH - self.known[name, tenant]):
                self.known[name, tenant] += 1
                self._arrive(StubJob(name, self.chance.randint(100, 1500), tenant))

    def _arrive(self, job: StubJob) -> None:
        self.since[job] = self.now
        self.admission.put(job, self.now)

    def _start(self, job: StubJob) -> None:
        owner = (job.tier, job.tenant)
        self.known[owner] -= 1
        self.in_flight[owner] += 1
        self.load.most_of_one_tenant[owner] = max(self.load.most_of_one_tenant[owner], self.in_flight[owner])
        for seated in self.engine.add(job, self.admission.rank(job), self.now):
            self._seated(seated)

    def _seated(self, job: StubJob) -> None:
        if job in self.since:  # else it had been pushed back
            waited = self.now - self.since.pop(job)
            self.load.waits[job.tier].append(waited)
            self.load.waits_of[job.tier, job.tenant].append(waited)

    def _end(self) -> None:
        job, seated = self.engine.end_next()
        self.load.tokens[job.tier][int(self.now // 60)] += job.cost
        self.in_flight[job.tier, job.tenant] -= 1
        self.admission.release(job)
        for each in seated:
            self._seated(each)


def hour_of(*args: object) -> Load:
    return Hour(*args).run()  # type: ignore[arg-type]


def poisson(tier: str, a_second: float, tenant: str = "default") -> list[tuple[float, StubJob]]:
    chance, now, arrivals = random.Random(1), 0.0, []
    while (now := now + chance.expovariate(a_second)) < HOUR:
        arrivals.append((now, StubJob(tier, chance.randint(100, 1500), tenant)))
    return arrivals


def test_saturated_tiers_get_their_shares_and_none_starves_in_any_minute() -> None:
    load = hour_of(TIERS, {tier.name: "t" for tier in TIERS}, [])
    for tier, share in zip(TIERS, shares(TIERS), strict=True):
        assert load.share(tier.name) == pytest.approx(share, rel=0.05)
        in_each = [load.tokens[tier.name][minute] for minute in range(60)]
        assert min(in_each) > 0.6 * share * 60 * SPEED, f"{tier.name} starved for a minute"


def test_a_floor_is_seen_in_the_shares_whatever_the_weights() -> None:
    tiers = [replace(tier, weight=weight) for tier, weight in zip(TIERS, (1e6, 1e3, 1.0), strict=True)]
    tiers[2] = replace(tiers[2], floor=0.15)
    load = hour_of(tiers, {tier.name: "t" for tier in tiers}, [])
    assert load.share("bulk") == pytest.approx(0.15, rel=0.05)
    assert load.share("standard") == pytest.approx(0.05, rel=0.1)


def test_a_quiet_interactive_tier_starts_at_once_above_saturated_ones() -> None:
    load = hour_of(TIERS, {"standard": "t", "bulk": "t"}, poisson("interactive", 1.0))
    waits = sorted(load.waits["interactive"])
    assert len(waits) > 3000
    assert waits[len(waits) * 99 // 100] < 1.0, "64 places end 10 jobs a second"
    assert load.share("bulk") / load.share("standard") == pytest.approx(0.25, rel=0.1)


def test_what_nobody_else_wants_goes_to_bulk() -> None:
    load = hour_of(TIERS, {"bulk": "t"}, poisson("interactive", 1.0))
    assert load.served().total() > 0.97 * HOUR * SPEED
    assert load.share("bulk") > 0.85


@pytest.mark.parametrize(("patience", "longest"), [(300.0, 700.0), (math.inf, math.inf)])
def test_promotion_bounds_the_wait_where_weights_alone_would_starve(patience: float, longest: float) -> None:
    tiers = (Tier("high", weight=1.0), Tier("low", weight=1e-6, promote_after_s=patience))
    load = hour_of(tiers, {"high": "t"}, poisson("low", 0.5))
    worst = max(load.waits["low"])
    assert worst < longest
    assert (worst > 3000.0) == (patience == math.inf), (
        "without promotion the first to come waits for the hour"
    )


def test_a_flood_of_one_tenant_does_not_hold_up_another_of_its_tier() -> None:
    load = hour_of(TIERS, {"bulk": "loud"}, poisson("bulk", 0.5, tenant="calm"))
    calm = sorted(load.waits_of["bulk", "calm"])
    assert len(calm) > 1500
    assert calm[len(calm) * 99 // 100] < 5.0
    assert sum(load.waits_of["bulk", "loud"]) / len(load.waits_of["bulk", "loud"]) > 15.0
    assert load.served().total() > 0.97 * HOUR * SPEED


def test_a_tenant_s_limit_holds_for_the_hour_and_leaves_places_to_others() -> None:
    limited = [*TIERS[:2], replace(TIERS[2], tenant_limit=20)]
    load = hour_of(limited, {"bulk": "loud"}, poisson("bulk", 5.0, tenant="calm"))
    assert load.most_of_one_tenant["bulk", "loud"] == 20
    assert load.most_of_one_tenant["bulk", "calm"] == 20
    assert load.served().total() < 0.7 * HOUR * SPEED, "two tenants of 20 places each cannot fill 64"


def test_a_reserve_shortens_the_wait_of_a_burst_that_may_not_preempt() -> None:
    bursts = [(at, StubJob("interactive", 500)) for at in range(60, 3600, 60) for _ in range(6)]
    longest: dict[float, float] = {}
    for reserve in (0.02, 0.1):
        tiers = (replace(TIERS[0], reserve=reserve, preempts=False), *TIERS[1:])
        longest[reserve] = max(hour_of(tiers, {"bulk": "t"}, bursts).waits["interactive"])
    assert longest[0.1] == 0.0
    assert longest[0.02] > 0.0
