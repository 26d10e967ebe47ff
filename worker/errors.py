"""What stops a worker: everything else it survives."""

from collections.abc import Sequence


class WorkerError(Exception):
    """Root of what the worker raises on purpose."""


class ConsumerFailed(WorkerError):
    """A consumer met an error that no retry mends (authorization, fencing, a defect)."""


class Overpromised(WorkerError, ValueError):
    """Tiers promise more than there is.

    knob: the field that is too much. tiers: the names of those that have it. more_places: whether more places in flight
    would help as well.
    """

    def __init__(self, message: str, knob: str, tiers: Sequence[str], more_places: bool = False) -> None:
        super().__init__(message)
        self.knob = knob
        self.tiers = tuple(tiers)
        self.more_places = more_places
