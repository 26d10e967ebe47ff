"""Stop strings: found across token borders, and cut out of text and tokens alike."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.engine.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was completed. ``chars``: characters of the text to keep.

    tokens: the fewest generated tokens whose text holds them all; a token that carries both the end of the kept text
    and the beginning of the stop string stays.
    """

    stop: str
    chars: int
    tokens: int


class StopWatch:
    """Watches one answer for its stop strings.

    The string completed first wins, so the result does not depend on how the tokens were grouped; of two completed by
    the same character the longer one wins, since it began earlier. A string that is complete within the first
    ``min_tokens`` tokens does not count. ``include``: keep the stop string in the text.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int = 0, *, include: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._include = include
        self._tail = ""  # the last characters, one fewer than the longest stop string
        self._tail_len = max(map(len, stops)) - 1
        self._lengths: list[int] = []  # characters known after each token
        self.hit: StopHit | None = None

    @property
    def tokens(self) -> int:
        """How many tokens were looked at."""
        return len(self._lengths)

    def feed(self, tokens: Iterable[int]) -> StopHit | None:
        """Look at the next tokens; return the hit, once there is one."""
        for token in tokens:
            if self.hit:
                break
            delta = self._detokenizer.feed((token,))
            self._lengths.append(self._length + len(delta))
            self._look(delta)
        return self.hit

    def close(self) -> StopHit | None:
        """Look at what the detokenizer still held back; return the hit, if there is one."""
        if not self.hit and self._lengths:
            delta = self._detokenizer.close()
            self._lengths[-1] += len(delta)
            self._look(delta)
        return self.hit

    @property
    def _length(self) -> int:
        return self._lengths[-1] if self._lengths else 0

    def _look(self, delta: str) -> None:
        if not delta:
            return
        window = self._tail + delta
        if self.tokens > self._min_tokens and (found := self._first(window, len(self._tail))):
            end, stop = found
            chars = self._length - len(window) + end - (0 if self._include else len(stop))
            # The token after which that many characters are there is the last one kept.
            self.hit = StopHit(stop, chars, bisect_left(self._lengths, chars) + 1 if chars else 0)
        self._tail = window[-self._tail_len :] if self._tail_len else ""

    def _first(self, window: str, old: int) -> tuple[int, str] | None:
        """The stop string completed first beyond ``window[:old]``, with the place where it ends."""
        found = []
        for stop in self._stops:
            at = window.find(stop, max(0, old - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), stop))
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)
