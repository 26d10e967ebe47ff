"""From settings to tiers, for the worker, and from tiers to what its engine must know of them."""

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.cli.errors import Failure
from headrace.cli.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.priorities import Priority
    from headrace.settings import Settings
    from headrace.worker import Tier
    from headrace.worker.errors import Overpromised


def tiers(settings: "Settings") -> "tuple[Tier, ...]":
    """How each tier is served, highest first. Raises Failure where they promise more than there is."""
    from headrace.worker.config import LEAST_IN_FLIGHT
    from headrace.worker.errors import Overpromised
    from headrace.worker.tiers import check_together, default_tiers

    served = tuple(_with_settings(tier, settings) for tier in default_tiers(settings.tiers))
    try:
        check_together(served, settings.max_in_flight or LEAST_IN_FLIGHT)
    except Overpromised as error:
        raise Failure(Exit.USAGE, f"{error}.", _remedy(error)) from None
    return served


def priorities(tiers: "Sequence[Tier]") -> "tuple[Priority, ...]":
    """The engine's view of tiers: one priority each."""
    from headrace.engine.priorities import Priority

    return tuple(
        Priority(reserve=tier.reserve, preempts=tier.preempts, max_preemptions=tier.max_preemptions)
        for tier in tiers
    )


def _remedy(error: "Overpromised") -> str:
    from headrace.settings import tier_variable, variable

    knobs = " or ".join(tier_variable(tier, error.knob) for tier in error.tiers)
    if error.more_places:
        return f"Raise {variable('max_in_flight')}, lower {knobs}, or set one to 0."
    return f"Lower {knobs}."


def _with_settings(tier: "Tier", settings: "Settings") -> "Tier":
    given = settings.of_tier(tier.name).model_dump(exclude_none=True)
    if (patience := given.pop("promote_after_seconds", None)) is not None:
        given["promote_after_s"] = patience
    return replace(tier, **{"prefetch": settings.prefetch, **given})
