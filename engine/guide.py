"""One sequence's way through its grammar: where it stands, and how it gets to an end before its room does.

An answer under a grammar must be complete at its last token. So the guide knows a place from which the answer can be
completed in the room that is left, and the tokens that would do it (``engine/closing.py``): none where it is complete
already, which is seen at each token. It looks again for a later such place, ever more often as the room shrinks. The
model chooses freely all the same; only if the answer is not complete at its limit, it goes back to that place and takes
those tokens. Where no such place was ever found, the answer is cut.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from headrace.engine.closing import Closing, Patience

NEAR = 8
"""A place from which completion would leave no more tokens than this to spare is near enough to the limit: none later is looked for."""
BETWEEN_STEPS = Patience(guesses=8)
"""Of a walk for which all sequences wait."""


class Outcome(Enum):
    """What a guide asks of the scheduler, at one length of its sequence."""

    COMPLETE = auto()
    """Nothing can follow."""
    CLOSED = auto()
    """Completed by force, for lack of room."""
    BACK = auto()
    """The tokens from ``Guide.length`` on are to be dropped, and others generated."""
    FAILED = auto()
    """The grammar turned out to be too complex for its matcher."""


@dataclass(frozen=True, slots=True)
class _Safe:
    """With the first ``length`` tokens, ``way`` completes the answer within its limit."""

    length: int
    way: list[int]


class Guide:
    """Follows one sequence. Lengths and positions count the prompt.

    matcher: has taken in all tokens from the prompt's end to ``length``. may_end_at: the first position at which the model
    may end an answer that could go on, with one of its ``end_tokens``. thoughts: as its grammar has them. forced: the tokens
    that must come next. Between an ``outcome`` and ``resume``, or the sequence's end, tokens are overshoot and ignored.
    """

    def __init__(
        self,
        matcher: Any,
        closing: Closing,
        *,
        length: int,
        limit: int,
        may_end_at: int,
        end_tokens: tuple[int, ...],
        thoughts: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.matcher = matcher
        self.length = length
        self.may_end_at = may_end_at
        self.end_tokens = end_tokens
        self.forced: list[int] = []
        self.outcome: Outcome | None = None
        self._outcome_at = length
        self._closing = closing
        self._thoughts = thoughts
        self._limit = limit
        self._safe: _Safe | None = None
        self._look_at = length + (limit - length) // 4

    def start(self, way: list[int]) -> None:
        """Begin where a way to complete the answer is known from the prompt's end."""
        self._stand(way)

    def wants(self, position: int) -> bool:
        """Whether the token sampled at this position is the answer's next one, and not overshoot."""
        return self.outcome is None and position == self.length

    def took(self) -> None:
        """The matcher has just taken in the next token."""
        self.length += 1
        closing_now = bool(self.forced)
        self.forced = self.forced[1:]
        if self.matcher.is_error():
            self.fail()
        elif closing_now:
            if not self.forced:
                self._end(Outcome.CLOSED)
        elif self.matcher.is_stopped():
            self._end(Outcome.COMPLETE)
        elif self.matcher.is_accepting():  # takes a microsecond
            self._stand([])
        elif self.length >= self._look_at:
            self._look()

    def fail(self) -> None:
        """The matcher has met one of its limits, or a defect of its own."""
        self._end(Outcome.FAILED)

    def end_unchosen(self) -> None:
        """No next token could be chosen: the scheduler ends the sequence once it reads that, and not for the guide's sake."""
        self.length += 1
        self.fail()

    def due(self, length: int) -> Outcome | None:
        """The outcome that concerns a sequence of this length, which it may not have reached yet."""
        return self.outcome if length >= self._outcome_at else None

    def resume(self) -> None:
        """Go on from ``length``, now that the tokens behind it are dropped."""
        self.outcome = None

    def _stand(self, way: list[int]) -> None:
        """The answer can be completed from here, in this way."""
        self._safe = _Safe(self.length, way)
        spare = self._limit - self.length - len(way)
        self._look_at = self.length + spare // 2 if spare > NEAR else self._limit

    def _look(self) -> None:
        """Find the way to completion from here."""
        room = self._limit - self.length
        way = self._closing.way(self.matcher, room, BETWEEN_STEPS, self._thoughts)
        if way is not None:
            self._stand(way)
        elif room:
            self._look_at = self.length + room // 3 if room > NEAR else self._limit
        elif self._safe is not None:
            self._go_back(self._safe)

    def _go_back(self, place: _Safe) -> None:
        self._end(Outcome.BACK)
        self.matcher.rollback(self.length - place.length)
        self.length, self.forced = place.length, place.way

    def _end(self, outcome: Outcome) -> None:
        self.outcome, self._outcome_at = outcome, self.length


class GuidedRow(NamedTuple):
    """Of a step: the index among its sample rows, whose guide, and the position that is sampled."""

    row: int
    guide: Guide
    position: int
