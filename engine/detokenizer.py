"""Token ids back to text, all at once or as they come."""

import codecs
from collections.abc import Iterable, Sequence

from headrace.engine.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer, fed token by token or in any larger runs: the joined deltas are always the same text.

    A character whose bytes are not all there yet is held back; bytes that can never become one turn into U+FFFD, one
    for each maximal invalid run, as Unicode recommends.

    The answer goes on where the prompt ends. So a SentencePiece answer keeps its leading space (``prompt + answer``
    is what decoding both together gives), and a character that the prompt leaves unfinished is completed by the
    answer's first bytes; if they do not, the prompt's bytes leave no trace.

    skip_special: leave out special tokens, but for those ``shown``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special=skip_special, shown=shown)
        self._decoder = _UTF8("replace")
        self._unfinished = _unfinished(_tail(self._pieces, prompt))
        at_start = tokenizer.strips > 0 and not any(self._pieces[token] for token in prompt)
        self._strips = tokenizer.strips if at_start else 0
        self._begun = False

    def feed(self, tokens: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain by now and was not returned before."""
        pieces = self._pieces
        data = b"".join([pieces[token] for token in tokens])
        if data and not self._begun:
            data = self._begin(data)
        return self._decoder.decode(data)

    def close(self) -> str:
        """Return what was held back, now that nothing follows."""
        return self._decoder.decode(b"", final=True)

    def _begin(self, data: bytes) -> bytes:
        """The answer's first bytes, joined to the prompt's unfinished character if they go on with it."""
        self._begun = True
        for _ in range(self._strips):
            data = data.removeprefix(b" ")
        if self._unfinished and _continues(self._unfinished, data[:1]):
            return self._unfinished + data
        return data


def detokenize(
    tokenizer: Tokenizer, tokens: Iterable[int], prompt: Sequence[int] = (), *, skip_special: bool = True
) -> str:
    """The whole text of an answer: what a ``Detokenizer`` gives in deltas."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=skip_special)
    return detokenizer.feed(tokens) + detokenizer.close()


def _tail(pieces: list[bytes], tokens: Sequence[int]) -> bytes:
    """At least the last three bytes, the most that an unfinished character has."""
    tail = b""
    for token in reversed(tokens):
        tail = pieces[token] + tail
        if len(tail) >= 3:
            break
    return tail


def _unfinished(data: bytes) -> bytes:
    decoder = _UTF8("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(start: bytes, byte: bytes) -> bool:
    try:
        _UTF8("strict").decode(start + byte)
    except UnicodeDecodeError:
        return False
    return True
