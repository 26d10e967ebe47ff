"""Tiers: how jobs of each urgency are served. Plain values, checked when they are made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.worker.errors import Overpromised


@dataclass(frozen=True, slots=True)
class Tier:
    """How one tier is served. Order in the worker's configuration is rank: the first is the highest.

    weight: share of the tokens while all tiers wait. floor: least share, in [0, 1), whatever the weights say.
    promote_after_s: a job that has waited longer in this worker moves one tier up; infinite for never. reserve: share of
    the worker's places in flight, and of its engine's slots and KV blocks, in [0, 1), that lower tiers leave free.
    preempts: whether its jobs may push back running jobs of lower tiers, when the engine has no slot or no block for
    them. max_preemptions: how often one of its own jobs may be pushed back so. tenant_limit: jobs of one tenant in
    flight at once in this worker; None for any number. prefetch: records held at once, finished ones whose publish is
    not confirmed included; None for four times as many as may be in flight, so that what is written gathers.

    Raises ValueError, naming tier and field.
    """

    name: str
    weight: float = 1.0
    floor: float = 0.0
    promote_after_s: float = math.inf
    reserve: float = 0.0
    preempts: bool = True
    max_preemptions: int = 3
    tenant_limit: int | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        self._require(0.0 < self.weight < math.inf, "weight", "must be greater than 0")
        self._require(0.0 <= self.floor < 1.0, "floor", "must lie in [0, 1)")
        self._require(self.promote_after_s > 0.0, "promote_after_s", "must be greater than 0")
        self._require(0.0 <= self.reserve < 1.0, "reserve", "must lie in [0, 1)")
        self._require(self.max_preemptions >= 0, "max_preemptions", "must not be negative")
        self._require(
            self.tenant_limit is None or self.tenant_limit >= 1, "tenant_limit", "must be at least 1"
        )
        self._require(self.prefetch is None or self.prefetch >= 1, "prefetch", "must be at least 1")

    def _require(self, condition: bool, field: str, what: str) -> None:
        if not condition:
            raise ValueError(f"tier {self.name}: {field} {what}, not {getattr(self, field)}")

    def holds(self, in_flight: int) -> int:
        """How many records it holds at once where so many jobs may be in flight."""
        return 4 * in_flight if self.prefetch is None else self.prefetch

    def places(self, total: int) -> int:
        """How many of ``total`` places its reserve is: where there is a choice, one at least, and never all."""
        return min(max(1, int(self.reserve * total)), total - 1) if self.reserve else 0


def default_tiers(names: Sequence[str]) -> tuple[Tier, ...]:
    """Tiers for any set of names, highest first.

    Each weighs four times the next, and none gets less than 5% (less still where there are more than ten). A job that
    waits is promoted after ten minutes for each tier above its own. For the highest, 2% is kept free.
    """
    lowest = len(names) - 1
    return tuple(
        Tier(
            name,
            weight=4.0 ** (lowest - rank),
            floor=min(0.05, 0.5 / len(names)),
            promote_after_s=600.0 * rank or math.inf,
            reserve=0.02 if rank == 0 < lowest else 0.0,
        )
        for rank, name in enumerate(names)
    )


def check_together(tiers: Sequence[Tier], places: int) -> None:
    """Raise Overpromised where the tiers promise more than there is. places: jobs that may be in flight at once."""
    floors = {tier.name: tier.floor for tier in tiers if tier.floor}
    reserves = {tier.name: tier.reserve for tier in tiers if tier.reserve}
    if sum(floors.values()) > 1.0:
        message = f"the tiers' floors must add up to 1 at most, and are {_each(floors)}"
        raise Overpromised(message, "floor", [*floors])
    if sum(reserves.values()) >= 1.0:
        message = f"the tiers' reserves must add up to less than 1, or the lowest tier never runs, and are {_each(reserves)}"
        raise Overpromised(message, "reserve", [*reserves])
    if sum(tier.places(places) for tier in tiers) >= max(places, 1):
        message = (
            f"the tiers reserve all {places} places in flight ({_each(reserves)}; one place each at least)"
        )
        raise Overpromised(message, "reserve", [*reserves], more_places=True)


def _each(values: dict[str, float]) -> str:
    return ", ".join(f"{value:g} of {name}" for name, value in values.items())


def shares(tiers: Sequence[Tier]) -> list[float]:
    """Each tier's part of the tokens while all wait: by weight, no part below its floor."""
    lifted: set[str] = set()
    while True:
        left = 1.0 - sum(tier.floor for tier in tiers if tier.name in lifted)
        weights = sum(tier.weight for tier in tiers if tier.name not in lifted)
        parts = [tier.floor if tier.name in lifted else left * tier.weight / weights for tier in tiers]
        below = {tier.name for tier, part in zip(tiers, parts, strict=True) if part < tier.floor}
        if not below:
            return parts
        lifted |= below
