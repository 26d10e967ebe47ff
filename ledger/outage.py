"""What a process that stays says while another is away: at once, then after pauses that grow, with how long it has been."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SOONEST_S = 1.0
SELDOMEST_S = 60.0


class Outage:
    """Of one that may be away and come back, again and again. For one thread. clock: seconds that only grow."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._whom = ""
        self._since: float | None = None
        self._next = 0.0

    def lasts(self, whom: str, what: str, why: object) -> None:
        """``whom`` is away. Say at WARNING ``what`` that means and why, if it was not said just now."""
        now = self._clock()
        if self._since is None:
            self._whom, self._since, self._next = whom, now, now
        if now < self._next:
            return
        so_far = now - self._since
        self._next = now + min(max(so_far, SOONEST_S), SELDOMEST_S)
        self._log.warning("%s%s: %s", what, f", {so_far:.0f} s so far" if so_far else "", why)

    def over(self) -> None:
        """It is there. Say at INFO that it is back, if it was away."""
        if self._since is not None:
            self._log.info("%s is back after %.0f s", self._whom, self._clock() - self._since)
            self._since = None
