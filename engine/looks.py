"""Requests that look at prompts and generate nothing: continuations to be scored, vectors to be pooled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import InvalidRequest
from headrace.engine.request import Completion, Outputs, Request
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import Limits, check_prompt

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextRequest


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a continuation of a prompt.

    logprob: of all its tokens together, a natural logarithm. tokens: how many they are. is_greedy: whether each is the
    likeliest at its place, so that greedy decoding would say the same.
    """

    logprob: float
    tokens: int
    is_greedy: bool


def looks(
    request: "TextRequest", names: Sequence[str], prompt: list[int], tokenizer: Tokenizer, limits: Limits
) -> list[Request]:
    """The engine's requests for one that looks, by these names: one a continuation, or an input.

    Raises InvalidRequest.
    """
    whole = Request(
        id=names[0],
        prompt=prompt,
        priority=request.priority,
        deadline=request.deadline,
        salt=request.salt,
    )
    if request.pooling is not None:
        prompts = (
            [prompt] if request.inputs is None else _input_ids(request, request.inputs, tokenizer, limits)
        )
        return [
            replace(whole, id=name, prompt=ids, outputs=Outputs.VECTOR, pooling=request.pooling)
            for name, ids in zip(names, prompts, strict=True)
        ]
    ends = _continuation_ids(request, prompt, tokenizer)
    for place, end in enumerate(ends):
        _check_continuation(place, prompt, end, limits)
    return [
        replace(
            whole,
            id=name,
            prompt=prompt + end,
            outputs=Outputs.LOGPROBS,
            need_from=len(prompt) - 1,
            prompt_logprobs=1,
        )
        for name, end in zip(names, ends, strict=True)
    ]


def score(done: Completion) -> Score:
    """The score of one continuation; its tokens are those whose log-probabilities were wanted."""
    logprobs = done.prompt_logprobs
    assert logprobs is not None, "only completions of scored continuations have a score"
    likeliest = bool((logprobs.chosen >= logprobs.top[:, 0]).all())
    return Score(float(logprobs.chosen.sum(dtype=np.float64)), len(logprobs.chosen), likeliest)


def pooled(done: Completion, *, normalize: bool) -> NDArray[np.float32]:
    """The vector of one prompt, [H]; of length 1 if it is to be normalised."""
    vector = done.vector
    assert vector is not None, "only completions of pooled prompts have a vector"
    return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12)) if normalize else vector


def _input_ids(
    request: "TextRequest", inputs: Sequence[str | Sequence[int]], tokenizer: Tokenizer, limits: Limits
) -> Iterable[list[int]]:
    """The ids of each, cut as the request says. Raises InvalidRequest."""
    of_texts = iter(tokenizer.encode_many([text for text in inputs if isinstance(text, str)]))
    for place, item in enumerate(inputs):
        ids = next(of_texts) if isinstance(item, str) else list(item)
        if request.truncate_prompt_tokens is not None:
            ids = ids[-request.truncate_prompt_tokens :]
        check_prompt(ids, f"inputs[{place}]", 0, limits)
        yield ids


def _continuation_ids(request: "TextRequest", prompt: list[int], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each: of a text, those by which prompt and text together are longer than the prompt alone.

    So do evaluation harnesses, because tokens depend on what stands before. After messages and ids, where no text of the
    prompt's is at hand, a text is taken by itself.
    """
    continuations = request.continuations or ()
    texts = [text for text in continuations if isinstance(text, str)]
    before = request.prompt
    if before is None:
        encoded = tokenizer.encode_rendered(texts)
    else:
        alone, *both = tokenizer.encode_many([before, *(before + text for text in texts)])
        encoded = [ids[len(alone) :] for ids in both]
    of_texts = iter(encoded)
    return [next(of_texts) if isinstance(item, str) else list(item) for item in continuations]


def _check_continuation(place: int, prompt: list[int], end: list[int], limits: Limits) -> None:
    param = f"continuations[{place}]"
    if not end:
        message = f"{param} adds no token to the prompt's: begin it with a space, or give token ids"
        raise InvalidRequest(message, param=param, code="invalid_value")
    if max(end) >= limits.vocab_size:
        raise InvalidRequest(
            f"{param} has token {max(end):,}, but the model's vocabulary ends at {limits.vocab_size - 1:,}",
            param=param,
            code="invalid_value",
        )
    length = len(prompt) + len(end)
    if length > limits.max_context:
        raise InvalidRequest(
            f"{param} and the prompt have {length:,} tokens, but the context holds {limits.max_context:,} tokens",
            param=param,
            code="context_length_exceeded",
        )
