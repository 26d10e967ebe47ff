"""Which waiting job runs next: deficit round-robin over the tiers, charged in tokens; earliest deadline first inside.

Each round gives every tier its share of tokens to spend, and within a round the higher tiers spend first. So a job of
a tier that has been quiet runs at once, a saturated tier gets its share and no more, and no tier starves however long
the others' backlog is. A tier that is empty saves nothing up. A job that has waited longer than its tier's
``promote_after_s`` moves one tier up.

Pure bookkeeping: the caller tells the time. Size is bounded by what the consumers may hold.

M. Shreedhar, G. Varghese: Efficient Fair Queuing Using Deficit Round-Robin, IEEE/ACM ToN 4(3), 1996.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

ROUND_TOKENS = 16_384  # a round's tokens over all tiers; small enough to be fair within seconds


@dataclass(frozen=True, slots=True)
class Tier:
    """How one tier is served. Order in the worker's configuration is rank: the first is the highest.

    weight: share of the tokens while all tiers wait. floor: least share, in [0, 1), whatever the weights say.
    promote_after_s: a job waiting longer moves one tier up; None for never. prefetch: records held at once, finished
    ones whose publish is not confirmed included. reserve: of the worker's places in flight, so many are kept free for
    this tier and those above it.
    """

    name: str
    weight: float = 1.0
    floor: float = 0.0
    promote_after_s: float | None = None
    prefetch: int = 1024
    reserve: int = 0


def default_tiers(names: Sequence[str]) -> tuple[Tier, ...]:
    """Tiers for any set of names, highest first: each weighs four times the next, none gets under 5%."""
    lowest = len(names) - 1
    return tuple(
        Tier(
            name,
            weight=4.0 ** (lowest - rank),
            floor=0.05,
            promote_after_s=600.0 * rank or None,
            reserve=0 if rank == lowest else 2,
        )
        for rank, name in enumerate(names)
    )


class Waiting(Protocol):
    """What admission needs to know of a job."""

    @property
    def cost(self) -> int:
        """Tokens it is expected to take, prompt and answer."""

    @property
    def deadline_s(self) -> float | None:
        """Seconds since the epoch."""

    @property
    def waiting(self) -> bool:
        """False once it must not run any more: cancelled, expired, or its partition is another's."""


W = TypeVar("W", bound=Waiting)


@dataclass(eq=False, slots=True)
class _Entry(Generic[W]):
    job: W
    since: float
    moved: bool = False  # to the next tier up

    @property
    def stale(self) -> bool:
        return self.moved or not self.job.waiting


@dataclass(eq=False, slots=True)
class _Queue(Generic[W]):
    """One tier's jobs, by deadline and by age; stale entries leave when they come to the front."""

    tier: Tier
    quantum: float  # tokens a round
    credit: float
    by_deadline: list[tuple[float, int, _Entry[W]]] = field(default_factory=list)
    by_age: deque[_Entry[W]] = field(default_factory=deque)
    compact_at: int = 1024

    def front(self) -> W | None:
        while self.by_deadline and self.by_deadline[0][2].stale:
            heapq.heappop(self.by_deadline)
        return self.by_deadline[0][2].job if self.by_deadline else None

    def pop(self) -> W:
        entry = heapq.heappop(self.by_deadline)[2]
        entry.moved = True
        return entry.job

    def compact(self) -> None:
        """Drop stale entries that hide behind live ones, now and then, so that memory follows what really waits."""
        if max(len(self.by_deadline), len(self.by_age)) > self.compact_at:
            self.by_deadline = [item for item in self.by_deadline if not item[2].stale]
            heapq.heapify(self.by_deadline)
            self.by_age = deque(entry for entry in self.by_age if not entry.stale)
            self.compact_at = max(1024, 2 * len(self.by_deadline))


class Admission(Generic[W]):
    """The jobs that wait, and the order they leave in."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        shares = _shares(tiers)
        self._queues: list[_Queue[W]] = [
            _Queue(tier, share * ROUND_TOKENS, share * ROUND_TOKENS)
            for tier, share in zip(tiers, shares, strict=True)
        ]
        self._rank = {tier.name: rank for rank, tier in enumerate(tiers)}
        self._order = itertools.count()

    def rank(self, tier: str) -> int:
        """0 for the highest tier."""
        return self._rank[tier]

    def put(self, job: W, tier: str, now: float) -> None:
        """Let a job wait in its tier from ``now``."""
        self._push(self._queues[self._rank[tier]], _Entry(job, now))

    def take(self, room: int, now: float) -> list[W]:
        """Up to ``room`` jobs to run next. The last places are for the tiers that reserve them."""
        self._promote(now)
        taken: list[W] = []
        while (queue := self._next(room - len(taken))) is not None:
            job = queue.pop()
            queue.credit -= job.cost
            taken.append(job)
        return taken

    def waiting(self) -> dict[str, int]:
        """Jobs waiting in each tier."""
        return {q.tier.name: sum(not entry.stale for _, _, entry in q.by_deadline) for q in self._queues}

    def _next(self, room: int) -> _Queue[W] | None:
        """The tier whose turn it is, if any has a job and a place."""
        fronts = [(queue, job) for queue in self._open(room) if (job := queue.front()) is not None]
        while fronts:
            for queue, job in fronts:
                if queue.credit >= job.cost:
                    return queue
            self._new_round()
        return None

    def _open(self, room: int) -> list[_Queue[W]]:
        """The tiers that may use one of ``room`` free places: what higher tiers reserve is kept free of lower ones."""
        allowed, kept = [], 0
        for queue in self._queues:
            if room > kept:
                allowed.append(queue)
            kept += queue.tier.reserve
        return allowed

    def _new_round(self) -> None:
        for queue in self._queues:
            queue.credit = queue.quantum + (queue.credit if queue.front() is not None else 0.0)

    def _promote(self, now: float) -> None:
        for above, queue in itertools.pairwise(self._queues):
            patience = queue.tier.promote_after_s
            while queue.by_age and (queue.by_age[0].stale or _overdue(queue.by_age[0], patience, now)):
                entry = queue.by_age.popleft()
                if not entry.stale:
                    entry.moved = True
                    self._push(above, _Entry(entry.job, now))

    def _push(self, queue: _Queue[W], entry: _Entry[W]) -> None:
        deadline = entry.job.deadline_s
        key = float("inf") if deadline is None else deadline
        heapq.heappush(queue.by_deadline, (key, next(self._order), entry))
        queue.by_age.append(entry)
        queue.compact()


def _overdue(entry: _Entry[W], patience: float | None, now: float) -> bool:
    return patience is not None and now - entry.since >= patience


def _shares(tiers: Sequence[Tier]) -> list[float]:
    """Each tier's part of a round: by weight, the floors first lifted and the rest scaled to what is left."""
    total = sum(tier.weight for tier in tiers)
    lifted = {tier.name: tier.floor for tier in tiers if tier.floor > tier.weight / total}
    rest = sum(tier.weight for tier in tiers if tier.name not in lifted)
    left = 1.0 - sum(lifted.values())
    return [lifted.get(tier.name, left * tier.weight / rest if rest else 0.0) for tier in tiers]
