"""A limit on dead letters: a worker that gives up on too much of what it meets stops taking more, and says why.

Whatever is wrong then (a bad deploy, a producer that sends rubbish), going on would only make more dead letters, while
what is not taken waits in Kafka and loses nothing. It goes on by itself after a pause, and pauses for twice as long
each time that what comes next is no better. So rubbish passes without anybody's help, and a bad deploy costs
``most`` records a pause, not the whole backlog: a restart with a good version goes on at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadLetterLimit:
    """most: dead letters in ``window_s`` seconds; None or 0 for any number. share: of the records that ended in them;
    below it a busy worker's few bad ones are no reason to stop. pause_s: the first pause; longest_pause_s: the last.
    """

    most: int | None = 1000
    share: float = 0.1
    window_s: float = 60.0
    pause_s: float = 60.0
    longest_pause_s: float = 900.0


class Brake:
    """Counts how records end, in one window after another. The caller tells the time, in seconds that only grow."""

    def __init__(self, limit: DeadLetterLimit) -> None:
        self._limit = limit
        self._dead = self._ended = 0
        self._window_ends = 0.0
        self._paused_until = 0.0
        self._pause_s = limit.pause_s
        self._reason: str | None = None

    def note(self, *, dead: bool, now: float) -> None:
        """A record has ended, as a dead letter or otherwise."""
        if now >= self._window_ends:
            self._dead = self._ended = 0
            self._window_ends = now + self._limit.window_s
        self._ended += 1
        self._dead += dead
        if dead and self._reason is None and self._is_too_much():
            self._pull(now)

    def reason(self, now: float) -> str | None:
        """Why nothing more is to be taken; None while all is well, or well enough to try again."""
        if self._reason is not None and now >= self._paused_until:
            self._reason = None
            self._window_ends = now  # what was counted before the pause has been answered for
        return self._reason

    def _is_too_much(self) -> bool:
        most = self._limit.most
        return bool(most) and self._dead > (most or 0) and self._dead > self._limit.share * self._ended

    def _pull(self, now: float) -> None:
        since_last = now - self._paused_until
        if self._paused_until and since_last < self._limit.window_s:
            self._pause_s = min(2 * self._pause_s, self._limit.longest_pause_s)
        else:
            self._pause_s = self._limit.pause_s
        self._paused_until = now + self._pause_s
        self._reason = (
            f"{self._dead:,} of the {self._ended:,} records that ended lately became dead letters, over the limit of"
            f" {self._limit.most:,} in {self._limit.window_s:g} s; no more are taken for {self._pause_s:g} s"
        )
