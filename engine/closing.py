"""A short way to complete an answer from where it stands: what an answer takes when its room runs out.

The shortest of all ways would need a search; this is one walk. What the grammar forces is followed. Where it leaves a choice,
JSON is closed (`}`, `]`, `"`) or given a short value (`0`, `true`, `null`), and in any other text the walk guesses, by turns, the
longest token that is allowed and one that begins with a sign it has not used yet. Out of a thought leads its end. Found ways
are right, since the matcher has accepted each token; they may be longer than need be, and for texts whose end is hidden from
this walk none is found. So that no answer was found in some room is no proof that none fits: ``fewest`` has proof.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_SIGNS = b"@-.:/, _\n;=()[]{}<>|+*&%$#!?~^'`\"\\"
"""What may part a text, the likeliest first."""

_FORESEEN = 1024
"""Bytes of a forced text that its tokens are counted in."""

_MARK = b"\xff"
"""In llguidance's texts, what a special token's name stands behind."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How far a walk goes before it gives up.

    chosen: tokens that the grammar does not force: a text that has no end of its own would take any number. guesses: of
    these, tokens that JSON does not suggest; each takes about a millisecond. filling: characters that a guess may be
    repeated for, in strings of a minimum length.
    """

    chosen: int = 256
    guesses: int = 40
    filling: int = 0


class Closing:
    """Finds ways for the grammars of one vocabulary. pieces: each token's bytes, empty for special tokens."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.ids = {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}
        self._sorted = sorted(self.ids)
        self.lengths = np.array([len(piece) for piece in pieces])
        self.longest = int(self.lengths.max())
        self.chars = [sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces]
        self.first_bytes = np.array([piece[0] if piece else 0 for piece in pieces], np.uint8)
        ranks = np.full(256, len(_SIGNS))
        ranks[list(_SIGNS)] = np.arange(len(_SIGNS))
        self.sign_ranks = ranks[self.first_bytes]

    def way(
        self,
        matcher: Any,
        room: int,
        patience: Patience = Patience(),
        thoughts: Sequence[Sequence[int]] = (),
    ) -> list[int] | None:
        """At most ``room`` tokens that complete the answer; None if none were found. The matcher stays where it is.

        thoughts: each is a thought, or the end of one. They are tried where nothing else leads to the end, since an answer
        may hold the same text.
        """
        for thought in ((), *thoughts):
            if len(thought) > room:
                continue
            begun = matcher.deep_copy()
            if not thought or begun.try_consume_tokens(list(thought)) == len(thought):
                walk = _Walk(self, begun, patience, behind_thoughts=bool(thoughts))
                rest = walk.to_the_end(room - len(thought))
                if rest is not None:
                    return [*thought, *rest]
        return None

    def fewest(self, matcher: Any) -> int:
        """Tokens that every answer takes at least from where the matcher stands: those of the text that must come next.

        The last of them may say more than that text.
        """
        text = matcher.compute_ff_bytes()[:_FORESEEN].partition(_MARK)[0]
        best = list(range(len(text) + 1))  # tokens of so many of its bytes: at most one for each
        ends = []  # tokens of all of it and more
        for start in range(len(text)):
            for end in range(start + 2, min(start + self.longest, len(text)) + 1):
                if text[start:end] in self.ids:
                    best[end] = min(best[end], best[start] + 1)
            best[start + 1] = min(best[start + 1], best[start] + 1)
            if self._begins_a_token(text[start:]):
                ends.append(best[start] + 1)
        return min([best[-1], *ends])

    def _begins_a_token(self, text: bytes) -> bool:
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class _Walk:
    """One walk, with a matcher of its own: meeting a limit spoils it.

    behind_thoughts: a thought may stand before the answer, so that nothing forces an object's beginning.
    """

    def __init__(self, closing: Closing, matcher: Any, patience: Patience, *, behind_thoughts: bool) -> None:
        self._closing = closing
        self._matcher = matcher
        self._patience = patience
        self._behind_thoughts = behind_thoughts
        self._chosen = 0
        self._filled = 0  # characters
        self._quotes = 0  # in a row
        self._last: int | None = None
        self._seen = np.zeros(256, dtype=bool)
        self._guessed: list[int] = []

    def to_the_end(self, room: int) -> list[int] | None:
        taken: list[int] = []
        while not self._matcher.is_accepting():
            step = self._forced() or self._choice()
            if not step or len(taken) + len(step) > room or not self._matcher.consume_tokens(step):
                return None
            taken += step
            self._last = step[-1]
            self._quotes = self._quotes + 1 if step == [self._closing.ids.get(b'"')] else 0
        return taken

    def _forced(self) -> list[int]:
        """What must come next. The last forced bytes may be the beginning of many tokens; then those bytes alone."""
        if tokens := self._matcher.compute_ff_tokens():
            return list(tokens)
        text = self._matcher.compute_ff_bytes()
        prefixes = (self._closing.ids.get(text[:length]) for length in range(len(text), 0, -1))
        return next(([token] for token in prefixes if token is not None and self._allows(token)), [])

    def _choice(self) -> list[int]:
        if self._chosen == self._patience.chosen:
            return []
        self._chosen += 1
        return self._suggestion() or self._filling() or self._guess()

    def _suggestion(self) -> list[int]:
        """One token that brings JSON to its end, if one is allowed."""
        opening, brace, bracket, quote, zero = (
            self._closing.ids.get(sign) for sign in (b"{", b"}", b"]", b'"', b"0")
        )
        if self._allows(opening) and self._allows(brace):  # then this is text, where a brace closes nothing
            wanted = [quote if self._quotes <= 2 else None]
        else:
            wanted = [brace, bracket, quote, zero if self._last != zero else None]
            if not self._allows(self._closing.ids.get(b"q")):  # else letters are text, too
                wanted += map(self._closing.ids.get, (b"true", b"t", b"null", b"n"))
            if self._behind_thoughts and self._last is None:
                wanted.append(opening)  # behind the words, since an object may be the longer answer
        return next(([token] for token in wanted if token is not None and self._allows(token)), [])

    def _filling(self) -> list[int]:
        """The last guess once more, while the text must be longer."""
        if self._filled >= self._patience.filling or not self._guessed:
            return []
        again = self._guessed[-1]
        if self._last != again or not self._allows(again):
            return []
        self._filled += self._closing.chars[again]
        return [again]

    def _guess(self) -> list[int]:
        if (
            len(self._guessed) == self._patience.guesses or self._quotes > 2
        ):  # that text is no JSON: quotes close nothing
            return []
        closing = self._closing
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: len(closing.lengths)])
        special = allowed[closing.lengths[allowed] == 0]  # the grammar names them, so they lead on
        allowed = allowed[closing.lengths[allowed] > 0]
        if len(special) and (len(self._guessed) % 2 or not len(allowed)):
            self._guessed.append(int(special[0]))
            return [int(special[0])]
        if not len(allowed):
            return []
        lengths, first, ranks = closing.lengths, closing.first_bytes, closing.sign_ranks
        new = ~self._seen[first[allowed]]
        signs = allowed[new & (ranks[allowed] < len(_SIGNS))]
        if len(self._guessed) % 2 and len(signs):
            token = int(min(signs, key=lambda sign: (ranks[sign], lengths[sign])))
        else:
            again = np.isin(allowed, self._guessed)
            token = int(allowed[(2 * lengths[allowed] + new - 1000 * again).argmax()])
        self._seen[first[token]] = True
        self._guessed.append(token)
        return [token]

    def _allows(self, token: int | None) -> bool:
        return token is not None and self._matcher.validate_tokens([token]) == 1
