"""A worker's clock that a test may set ahead, so that hours pass when the test is ready for it, on any machine."""

import time

import pytest

from headrace.worker import worker


class Clock:
    """Stands for the module ``time`` in the worker's loop; ``ahead`` is in seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead

    def monotonic(self) -> float:
        """What lasts is measured as ever: only deadlines and waits that are told by the time of day come early."""
        return time.monotonic()


def install(patch: pytest.MonkeyPatch) -> Clock:
    """Give the workers of this process such a clock."""
    clock = Clock()
    patch.setattr(worker, "time", clock)
    return clock
