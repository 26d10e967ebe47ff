"""Which waiting job runs next: deficit round-robin over the tiers, charged in tokens.

Each round gives every tier its share of tokens to spend, and within a round the higher tiers spend first. So a job of
a tier that has been quiet runs at once, a saturated tier gets its share and no more, and no tier starves however long
the others' backlog is. A tier that is empty saves nothing up. A tier that has a reserve may have so many jobs in flight
whoever's turn it is, and owes for them. Which of a tier's jobs is next, ``tier_queue`` says. A job that has waited
longer than its tier's ``promote_after_s`` moves one tier up, and counts there.

Pure bookkeeping, without Kafka or engine: the caller tells the time. Size is bounded by what the consumers may hold.

M. Shreedhar, G. Varghese: Efficient Fair Queuing Using Deficit Round-Robin, IEEE/ACM ToN 4(3), 1996.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from headrace.worker.tier_queue import Owner, TierQueue, W
from headrace.worker.tiers import Tier, check_together, shares

ROUND_TOKENS = 16_384  # a round's tokens over all tiers; small enough to be fair within seconds
AHEAD = 8  # rounds that a tier may be kept waiting for a place while others, which have one, go on


@dataclass(eq=False, slots=True)
class _Lane(Generic[W]):
    """One tier. quantum: its tokens a round. credit: those left of this one. running: jobs that were taken from it."""

    tier: Tier
    rank: int
    queue: TierQueue[W]
    quantum: int
    credit: int
    reserve: int
    running: int = 0


class Admission(Generic[W]):
    """The jobs that wait, the order they leave in, and how many of whose are in flight.

    Args:
        tiers: highest first. Raises ValueError where they promise more than there is.
        places: how many jobs may be in flight at once, those not counted that a tier may push back: for it a lower tier's
            jobs are no obstacle.
    """

    def __init__(self, tiers: Sequence[Tier], places: int) -> None:
        check_together(tiers, places)
        self._places = places
        self._barred: set[Owner] = set()  # owners with as many jobs in flight as they may have
        self._lanes: list[_Lane[W]] = []
        for rank, (tier, share) in enumerate(zip(tiers, shares(tiers), strict=True)):
            patience = math.inf if rank == 0 else tier.promote_after_s
            quantum = max(1, round(share * ROUND_TOKENS))
            queue: TierQueue[W] = TierQueue(patience, self._barred)
            self._lanes.append(_Lane(tier, rank, queue, quantum, quantum, tier.places(places)))
        self._by_name = {lane.tier.name: lane for lane in self._lanes}
        self._in_flight: dict[W, tuple[_Lane[W], int]] = {}  # and the rank it runs with
        self._owned: Counter[Owner] = Counter()  # jobs in flight of owners that have a limit

    def resize(self, places: int) -> None:
        """From now on so many jobs may be in flight; those that are, stay."""
        if places != self._places:
            self._places = places
            for lane in self._lanes:
                lane.reserve = lane.tier.places(places)

    def put(self, job: W, now: float) -> None:
        """Let a job wait in its tier from ``now``."""
        self._by_name[job.tier].queue.put(job, now)

    def take(self, now: float, most: int | None = None) -> list[W]:
        """The jobs to run next, ``most`` of them at most; ``release`` each when it runs no more."""
        self._promote(now)
        taken: list[W] = []
        while (most is None or len(taken) < most) and (turn := self._next()) is not None:
            lane, rank = turn
            job = lane.queue.pop()
            lane.credit = max(lane.credit - job.cost, -lane.quantum)  # the debt of a reserve ends somewhere
            lane.running += 1
            self._in_flight[job] = lane, rank
            self._count(job, 1)
            taken.append(job)
        return taken

    def release(self, job: W) -> None:
        """A job is in flight no more. One that was never taken is ignored."""
        if job in self._in_flight:
            lane, _ = self._in_flight.pop(job)
            lane.running -= 1
            self._count(job, -1)

    def rank(self, job: W) -> int:
        """With which rank a job in flight runs, 0 the highest: its tier's, or that of the tier it was promoted to.

        One whose tier had its turn while higher ones waited runs as one of those, or what reaches the engine in the
        right order would be put in another there, and a low tier would wait until the engine holds little else.
        """
        return self._in_flight[job][1] if job in self._in_flight else self._by_name[job.tier].rank

    def waiting(self) -> dict[str, int]:
        """Jobs waiting in each tier."""
        return {lane.tier.name: len(lane.queue) for lane in self._lanes}

    def _next(self) -> tuple[_Lane[W], int] | None:
        """The tier whose turn it is, if it has a job and a place; and the rank of the highest that waits."""
        waiting = [(lane, job) for lane in self._lanes if (job := lane.queue.first()) is not None]
        placed = [lane for lane, _ in waiting if self._has_place(lane)]
        if not placed:
            return None
        turn = self._able(waiting, placed)
        while turn is None and all(lane.credit < job.cost + AHEAD * lane.quantum for lane, job in waiting):
            self._begin_round(
                max(1, min(-((lane.credit - job.cost) // lane.quantum) for lane, job in waiting))
            )
            turn = self._able(waiting, placed)
        if (
            turn is None
        ):  # it stays the turn of those that have no place; who has not had its reserve goes, and owes for it
            turn = next((lane for lane in placed if lane.running < lane.reserve), None)
        return None if turn is None else (turn, waiting[0][0].rank)

    @staticmethod
    def _able(waiting: list[tuple[_Lane[W], W]], placed: list[_Lane[W]]) -> _Lane[W] | None:
        """The highest tier that can pay for its next job and has a place for it."""
        return next((lane for lane, job in waiting if job.cost <= lane.credit and lane in placed), None)

    def _has_place(self, lane: _Lane[W]) -> bool:
        """Whether one more of this tier may be in flight, beside those that it cannot push back and what is reserved."""
        above = self._lanes[: lane.rank]
        kept = sum(max(0, each.reserve - each.running) for each in above)
        staying = [*above, lane] if lane.tier.preempts else self._lanes
        return sum(each.running for each in staying) + kept < self._places

    def _begin_round(self, rounds: int) -> None:
        """Give out the tokens of so many rounds, after which somebody can pay."""
        for lane in self._lanes:
            waits = lane.queue.first() is not None
            lane.credit = lane.credit + rounds * lane.quantum if waits else lane.quantum

    def _promote(self, now: float) -> None:
        for above, lane in itertools.pairwise(self._lanes):
            for job in lane.queue.overdue(now):
                above.queue.put(job, now)

    def _count(self, job: W, change: int) -> None:
        """Keep count of whose jobs are in flight, where that is limited."""
        limit = self._by_name[job.tier].tier.tenant_limit
        if limit is None:
            return
        owner = (job.tier, job.tenant)
        self._owned[owner] += change
        if self._owned[owner] >= limit:
            self._barred.add(owner)
        elif owner in self._barred:
            self._barred.remove(owner)
            for lane in self._lanes:
                lane.queue.readmit(owner)
        if not self._owned[owner]:
            del self._owned[owner]
