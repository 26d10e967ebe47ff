"""One tier's waiting jobs: fair between its tenants, earliest deadline first.

Deficit round-robin by tenant, charged in tokens. A round gives each tenant that waits the same tokens to spend, and
within a round the earliest deadline goes first, whosever it is. So a tenant alone is served by deadline only, and one
that floods the tier, with however early deadlines, gets its part and no more.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

ROUND_TOKENS = 2048
"""What a tenant may spend in a round: some ordinary jobs. More would heed deadlines more, and fairness less."""

COMPACT_AFTER = 1024

Owner = tuple[str, str]
"""Tier and tenant of a job: where a promoted job came from still says whose it is."""


class Waiting(Protocol):
    """What admission needs to know of a job. Hashable by identity."""

    @property
    def tier(self) -> str:
        """The tier that it was sent to."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

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
    left: bool = False  # taken, or promoted

    @property
    def stale(self) -> bool:
        return self.left or not self.job.waiting


_Ranked = tuple[float, int, _Entry[W]]  # deadline, number, entry: sorts by deadline, then by age


@dataclass(eq=False, slots=True)
class _Line(Generic[W]):
    """What one owner has waiting here.

    credit: tokens it may still spend in this round. offered: the number of its first entry while that stands in the
    queue's heap, else None.
    """

    owner: Owner
    credit: int = ROUND_TOKENS
    entries: "list[_Ranked[W]]" = field(default_factory=list)
    offered: int | None = None

    def head(self) -> "_Ranked[W] | None":
        while self.entries and self.entries[0][2].stale:
            heapq.heappop(self.entries)
        return self.entries[0] if self.entries else None

    def compact(self) -> None:
        self.entries = [ranked for ranked in self.entries if not ranked[2].stale]
        heapq.heapify(self.entries)


class TierQueue(Generic[W]):
    """The jobs of one tier, those promoted to it included.

    Args:
        patience: seconds after which ``overdue`` gives up a job; infinite for never.
        barred: owners that may start nothing now; tell ``readmit`` when one is no longer among them.
    """

    def __init__(self, patience: float, barred: Set[Owner]) -> None:
        self._patience, self._barred = patience, barred
        self._lines: dict[Owner, _Line[W]] = {}
        self._offers: list[tuple[float, int, _Line[W]]] = []  # lines that can pay for their first entry
        self._by_age: deque[_Entry[W]] = deque()
        self._numbers = itertools.count()
        self._put_since_compact = 0
        self._compact_after = COMPACT_AFTER

    def __len__(self) -> int:
        return sum(not entry.stale for line in self._lines.values() for _, _, entry in line.entries)

    def put(self, job: W, now: float) -> None:
        """Let a job wait from ``now``."""
        owner = (job.tier, job.tenant)
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(owner)
        entry = _Entry(job, now)
        deadline = math.inf if job.deadline_s is None else job.deadline_s
        heapq.heappush(line.entries, (deadline, next(self._numbers), entry))
        if self._patience < math.inf:
            self._by_age.append(entry)
        self._offer(line)
        self._put_since_compact += 1
        if self._put_since_compact > self._compact_after:
            self._compact()

    def first(self) -> W | None:
        """The job that goes next, if there is one that may."""
        while True:
            while self._offers:
                _, number, line = self._offers[0]
                head = line.head() if number == line.offered and line.owner not in self._barred else None
                if head is not None and head[1] == number:
                    return head[2].job
                heapq.heappop(self._offers)
                if number == line.offered:  # its first entry has changed, or it may start nothing
                    line.offered = None
                    self._offer(line)
            if not self._begin_round():
                return None

    def pop(self) -> W:
        """Take what ``first`` has just returned."""
        line = heapq.heappop(self._offers)[2]
        entry = heapq.heappop(line.entries)[2]
        entry.left = True
        line.credit -= entry.job.cost
        self._offer(line)
        return entry.job

    def readmit(self, owner: Owner) -> None:
        """The owner is not barred any more."""
        if line := self._lines.get(owner):
            self._offer(line)

    def overdue(self, now: float) -> Iterator[W]:
        """Take out the jobs that have waited too long."""
        while self._by_age:
            entry = self._by_age[0]
            if not entry.stale and now - entry.since < self._patience:
                return
            self._by_age.popleft()
            if not entry.stale:
                entry.left = True
                yield entry.job

    def _offer(self, line: _Line[W]) -> None:
        """Put the line where its first entry's deadline says, if it can pay for that."""
        head = line.head()
        if head is None or line.owner in self._barred or head[2].job.cost > line.credit:
            line.offered = None
        elif line.offered != head[1]:
            line.offered = head[1]
            heapq.heappush(self._offers, (head[0], head[1], line))

    def _begin_round(self) -> bool:
        """Give every owner that may start something its tokens; owners without jobs are forgotten. False: there is none.

        As many rounds at once as it takes until somebody can pay.
        """
        costs: list[tuple[_Line[W], int]] = []
        for owner, line in list(self._lines.items()):
            head = line.head()
            if head is None:
                del self._lines[owner]
            elif owner not in self._barred:
                costs.append((line, head[2].job.cost))
        if not costs:
            return False
        rounds = max(0, min(-((line.credit - cost) // ROUND_TOKENS) for line, cost in costs))
        for line, _ in costs:
            line.credit += rounds * ROUND_TOKENS
            self._offer(line)
        return True

    def _compact(self) -> None:
        """Drop stale entries that hide behind live ones, now and then, so that memory follows what really waits."""
        for line in self._lines.values():
            line.compact()
        self._by_age = deque(entry for entry in self._by_age if not entry.stale)
        self._put_since_compact, self._compact_after = 0, max(COMPACT_AFTER, len(self))
