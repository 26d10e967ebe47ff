"""How fast a batch goes and when it will end, from snapshots of its progress. No clock and no terminal here."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ledger import BatchProgress

WINDOW_S = 15.0


@dataclass(frozen=True, slots=True)
class Glance:
    """One look at a batch.

    total: None until something is known. outcomes: how many ended in which way. eta_s: None
    until something has ended in the window.
    """

    total: int | None
    outcomes: dict[str, int]
    running: int
    queued: int
    tokens_per_s: float
    eta_s: float | None

    @property
    def ended(self) -> int:
        """Jobs that will not change any more."""
        return sum(self.outcomes.values())


@dataclass(slots=True)
class Pace:
    """Rates over the last WINDOW_S seconds: results come in bursts, since many jobs run at once."""

    expected: int | None = None
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)

    def look(self, now: float, batch: "BatchProgress") -> Glance:
        """Take in a snapshot made at ``now`` (seconds of any steady clock)."""
        self._seen.append((now, batch.done, batch.completion_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        since, jobs, tokens = self._seen[0]
        span = now - since
        said = [count for count in (batch.total, self.expected) if count is not None]
        total = max(said, default=None)
        known = total if total is not None else batch.submitted + batch.rejected
        jobs_per_s = (batch.done - jobs) / span if span > 0 else 0.0
        return Glance(
            total=total,
            outcomes={
                "done": batch.succeeded,
                "failed": batch.failed,
                "cancelled": batch.cancelled,
                "expired": batch.expired,
                "rejected": batch.rejected,
            },
            running=batch.running,
            queued=max(0, known - batch.done - batch.running),
            tokens_per_s=(batch.completion_tokens - tokens) / span if span > 0 else 0.0,
            eta_s=(known - batch.done) / jobs_per_s if jobs_per_s > 0 else None,
        )
