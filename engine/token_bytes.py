"""The bytes each token stands for, read from a tokenizer's own decoder.

A byte table makes detokenising exact: the text of any run of tokens is their bytes joined and decoded, however the
run is split, so a character spread over tokens needs no guessing and joined deltas equal the final text. Where the
bytes are valid UTF-8 this is what the tokenizer's ``decode`` gives; where they are not, ``decode`` may take back text
it gave before (one stray byte spoils its whole run under byte fallback), and a table never does.

Understood: byte-level BPE (GPT-2, Llama 3, Qwen, converted tiktoken) and SentencePiece-style decoders with or without
byte fallback (Llama 2, Mistral, Gemma).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.engine.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """``pieces[id]``: the token's bytes, empty for an id that has no text. ``special``: ids that decode skips.

    strips: leading spaces that a text loses at its very beginning (SentencePiece writes one in front of every text).
    """

    pieces: list[bytes]
    special: frozenset[int]
    strips: int

    def without_special(self) -> list[bytes]:
        """``pieces`` with the special tokens silent."""
        shown = list(self.pieces)
        for token in self.special:
            shown[token] = b""
        return shown


def token_bytes(backend: Any) -> TokenBytes:
    """Read the table of a ``tokenizers.Tokenizer``.

    Raises UnsupportedModel for a decoder that is not understood.
    """
    to_bytes, strips = _decoder(json.loads(backend.to_str())["decoder"])
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        pieces[index] = to_bytes(token)
    added = backend.get_added_tokens_decoder()
    for index, token in added.items():
        # Added tokens are matched before any byte or space mapping and stand for themselves, unless the normalizer
        # rewrote them first (Llama's puts a space in front): then they decode like the vocabulary.
        matched = backend.id_to_token(index)
        pieces[index] = token.content.encode() if matched == token.content else to_bytes(matched)
    return TokenBytes(pieces, frozenset(index for index, token in added.items() if token.special), strips)


def _decoder(spec: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """A decoder's two effects: what one token becomes, and how many spaces the whole text loses in front."""
    byte_level = byte_fallback = fused = False
    replacements: list[tuple[str, str]] = []
    strips = 0
    for part in _parts(spec):
        match part:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                strips = start
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                replacements.append((old, " "))
                strips = 0 if scheme == "never" else 1
            case _:
                raise UnsupportedModel(f"the tokenizer's decoder has a part that is not implemented: {part}")

    def plain(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return (_byte_level if byte_level else plain), strips


def _parts(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if spec is None:
        raise UnsupportedModel("the tokenizer has no decoder, so the text between its tokens is unknown")
    if spec["type"] != "Sequence":
        yield spec
        return
    for part in spec["decoders"]:
        yield from _parts(part)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are written as themselves, the others as U+0100 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # not written in the alphabet, so it stands for itself
        return token.encode()
