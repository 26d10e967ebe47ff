"""Log-probabilities told with the tokens that they are of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from headrace.engine.request import Logprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability; a prompt's first token, which follows nothing, has none.

    top: the likeliest tokens of its place, likeliest first.
    """

    token_id: int
    data: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


def told(tokens: Sequence[int], logprobs: Logprobs, pieces: Sequence[bytes]) -> list[TokenLogprob]:
    """As many of the tokens as ``logprobs`` knows. pieces: each id's bytes."""

    def named(ids: Iterable[int], values: Iterable[float]) -> Iterable[TokenLogprob]:
        for token, value in zip(ids, values, strict=False):
            yield TokenLogprob(token, pieces[token], max(value, LEAST_LOGPROB))

    chosen = named(tokens, logprobs.chosen.tolist())
    tops = map(named, logprobs.top_ids.tolist(), logprobs.top.tolist())
    return [replace(token, top=tuple(top)) for token, top in zip(chosen, tops, strict=False)]


def told_prompt(
    prompt: Sequence[int], logprobs: Logprobs, likeliest: int, pieces: Sequence[bytes]
) -> list[TokenLogprob]:
    """All of a prompt's tokens, each with at most so many of the likeliest of its place."""
    fewer = replace(logprobs, top_ids=logprobs.top_ids[:, :likeliest], top=logprobs.top[:, :likeliest])
    return [TokenLogprob(prompt[0], pieces[prompt[0]], None), *told(prompt[1:], fewer, pieces)]
