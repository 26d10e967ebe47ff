"""A limit on dead letters: a worker that gives up on too much of what it meets stops taking more, and says why.

Whatever is wrong then (a bad deploy, a producer that sends rubbish), going on would only make more dead letters, while
what is not taken waits in Kafka and loses nothing. It goes on by itself after a pause, so rubbish passes without anybody's
help, and a restart with a good version goes on at once.

Two limits hold together. The one of a minute sees what is plainly broken; it pauses for twice as long each time that what
comes next is no better. The one of an hour sees a part that is lost steadily: it lets nothing more in before its hour is
over, so that what a worker loses in an hour is bounded, whatever else goes well.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadLetterLimit:
    """most: dead letters in ``window_s`` seconds; None or 0 for any number. share: of the records that ended in them;
    below it a busy worker's few bad ones are no reason to stop. pause_s: the first pause; longest_pause_s: the last.
    hourly: how many times ``most`` there may be in an hour; hourly_share: as share, in that hour.
    """

    most: int | None = 1000
    share: float = 0.1
    window_s: float = 60.0
    pause_s: float = 60.0
    longest_pause_s: float = 900.0
    hourly: int = 10
    hourly_share: float = 0.01


class Brake:
    """Counts how records end, in one window after another. The caller tells the time, in seconds that only grow."""

    def __init__(self, limit: DeadLetterLimit) -> None:
        self._limit = limit
        most = limit.most or 0
        self._minute = _Window(most, limit.share, limit.window_s)
        self._hour = _Window(limit.hourly * most, limit.hourly_share, 3600.0)
        self._paused_until = 0.0
        self._pause_s = limit.pause_s
        self._reason: str | None = None

    def note(self, *, dead: bool, now: float) -> None:
        """A record has ended, as a dead letter or otherwise."""
        for window in (self._minute, self._hour):
            window.note(dead, now)
        if not dead or not self._limit.most or self._reason is not None:
            return
        of_minute = self._next_pause(now) if self._minute.is_too_much else 0.0
        of_hour = max(self._hour.ends - now, self._limit.pause_s) if self._hour.is_too_much else 0.0
        if of_hour > of_minute:
            self._pull(self._hour, now, of_hour)
        elif of_minute:
            self._pull(self._minute, now, of_minute)

    def reason(self, now: float) -> str | None:
        """Why nothing more is to be taken; None while all is well, or well enough to try again."""
        if self._reason is not None and now >= self._paused_until:
            self._reason = None
            self._minute.ends = now  # what was counted before the pause has been answered for
        return self._reason

    def _next_pause(self, now: float) -> float:
        limit, since_last = self._limit, now - self._paused_until
        again = self._paused_until and since_last < limit.window_s
        self._pause_s = min(2 * self._pause_s, limit.longest_pause_s) if again else limit.pause_s
        return self._pause_s

    def _pull(self, window: "_Window", now: float, pause_s: float) -> None:
        self._paused_until = now + pause_s
        self._reason = (
            f"{window.dead:,} of the {window.ended:,} records that ended lately became dead letters, over the limit of"
            f" {window.most:,} in {window.length_s:g} s; no more are taken for {pause_s:.4g} s"
        )


class _Window:
    """What ended in the present one of windows of ``length_s`` seconds, each of which begins with a record."""

    def __init__(self, most: int, share: float, length_s: float) -> None:
        self.most, self.length_s = most, length_s
        self.dead = self.ended = 0
        self.ends = 0.0
        self._share = share

    def note(self, dead: bool, now: float) -> None:
        """A record has ended."""
        if now >= self.ends:
            self.dead = self.ended = 0
            self.ends = now + self.length_s
        self.ended += 1
        self.dead += dead

    @property
    def is_too_much(self) -> bool:
        """Whether more became dead letters than may, by number and by share."""
        return self.dead > self.most and self.dead > self._share * self.ended
