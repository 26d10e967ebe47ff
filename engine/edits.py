"""What a sequence changes about its logits before a token is chosen: penalties, biases, tokens and words kept out.

The host's half: a request's options as the arrays that a line of the device's table takes (``LogitEdits``). No torch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import InvalidRequest
from headrace.engine.request import SamplingParams

Ints = NDArray[np.int32]

MAX_LISTED = 1024
"""Distinct token ids that the options of one request may name, stop tokens apart."""

MAX_WORDS = 256
"""Token sequences of more than one token that one request may forbid, each of at most MAX_WORD_TOKENS."""

MAX_WORD_TOKENS = 16

LEAST_REPETITION = 1e-15
"""A lower repetition penalty does the same: what it divides stays finite, also when the temperature divides it again."""

FOR_EVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Edits:
    """As in ``headrace.kernels.edit_logits``, for one sequence.

    listed, until, bias: [E] token ids, the position before which each is kept out, and what is added to its logit.
    only_listed: no other token may come. words: [W, MAX_WORD_TOKENS]. last_position: edits change nothing from
    this position on.
    """

    prompt_len: int
    repetition: float
    frequency: float
    presence: float
    listed: Ints
    until: Ints
    bias: NDArray[np.float32]
    only_listed: bool
    words: Ints
    last_position: int


def edits_of(
    params: SamplingParams, prompt_len: int, stop_ids: tuple[int, ...], *, masked: bool = False
) -> Edits | None:
    """The edits that a request with these stop tokens asks for, None if none. Raises InvalidRequest.

    masked: a grammar's mask is laid over its logits once they are edited, if by nothing: there are edits in any case.
    """
    repetition = max(params.repetition_penalty or 1.0, LEAST_REPETITION)
    penalties = (repetition, params.frequency_penalty, params.presence_penalty)
    banned = {*params.banned_token_ids, *(word[0] for word in params.bad_words if len(word) == 1)}
    words = [word for word in params.bad_words if len(word) > 1]
    allowed = params.allowed_token_ids
    bias = dict.fromkeys(allowed or (), 0.0)
    bias |= {token: b for token, b in params.logit_bias if allowed is None or token in bias}
    bias |= {token: -np.inf for token in banned if allowed is None or token in bias}
    if len(bias) > MAX_LISTED:
        rest = "logit_bias" if params.logit_bias else "banned_token_ids"
        param = rest if allowed is None else "allowed_token_ids"
        raise InvalidRequest(
            f"{param} may name at most {MAX_LISTED:,} tokens, those of the other options and of bad_words included",
            param=param,
            code="invalid_value",
        )
    for_ever = masked or bool(bias or words) or penalties != (1.0, 0.0, 0.0)
    until = {}
    if params.min_tokens:
        until = {
            token: prompt_len + params.min_tokens for token in stop_ids if allowed is None or token in bias
        }
    if not for_ever and not until:
        return None
    listed = [*bias, *(until.keys() - bias.keys())]
    if allowed is not None and all(bias[token] == -np.inf or token in until for token in listed):
        raise InvalidRequest(
            "allowed_token_ids leaves no token to choose: banned_token_ids, bad_words and min_tokens keep all of them out",
            param="allowed_token_ids",
            code="invalid_value",
        )
    return Edits(
        prompt_len,
        *penalties,
        listed=np.array(listed, np.int32),
        until=np.array([until.get(token, 0) for token in listed], np.int32),
        bias=np.array([bias.get(token, 0.0) for token in listed], np.float32),
        only_listed=allowed is not None,
        words=_lines(words),
        last_position=FOR_EVER if for_ever else prompt_len + params.min_tokens,
    )


def _lines(words: list[tuple[int, ...]]) -> Ints:
    """One word a line, at its end."""
    if len(words) > MAX_WORDS or any(len(word) > MAX_WORD_TOKENS for word in words):
        raise InvalidRequest(
            f"bad_words may hold at most {MAX_WORDS} token sequences, each of at most {MAX_WORD_TOKENS} tokens",
            param="bad_words",
            code="invalid_value",
        )
    lines = np.full((len(words), MAX_WORD_TOKENS), -1, np.int32)
    for line, word in zip(lines, words, strict=True):
        line[-len(word) :] = word
    return lines
