"""Requests become sequences: checked against the model, with every open field filled in."""

import dataclasses
import hashlib
import time
from collections.abc import Container
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.edits import edits_of
from headrace.engine.errors import InvalidRequest
from headrace.engine.request import ModelInfo, Outputs, Request, SamplingParams
from headrace.engine.sequence import Sequence
from headrace.engine.slots import MAX_STOP_IDS

MAX_LOGPROBS = 20
_PLAIN = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1)


def refuse_duplicates(requests: SequenceOf[Request], running: Container[str]) -> None:
    """Raise InvalidRequest if an id stands twice here or is still running."""
    seen: set[str] = set()
    for request in requests:
        if request.id in seen or request.id in running:
            raise InvalidRequest(f"id {request.id!r} is already in use", param="id", code="duplicate_id")
        seen.add(request.id)


def new_sequence(request: Request, info: ModelInfo, arrival: int) -> Sequence:
    """Check a request against the model and fill in what it leaves open. Raises InvalidRequest."""
    prompt = np.asarray(request.prompt)
    if not len(prompt):
        raise InvalidRequest("the prompt is empty; at least one token is needed", param="prompt")
    if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= info.vocab_size:
        raise InvalidRequest(
            f"token ids must be whole numbers in [0, {info.vocab_size})", param="prompt_token_ids"
        )
    _check_reading(request, len(prompt))
    if request.outputs is not Outputs.TOKENS:
        return _reader(request, prompt, info, arrival)
    if len(prompt) >= info.max_context:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; at most {info.max_context - 1} fit the context of"
            f" {info.max_context} and leave room for an answer",
            param="prompt",
            code="context_length_exceeded",
        )
    params = _resolve(request.sampling, info)
    _check_token_ids(params, info.vocab_size)
    guided = request.grammar is not None
    if guided:
        _check_guided(request)
    stops = (*(() if params.ignore_eos else info.eos_ids), *params.stop_token_ids)
    if guided:  # its grammar says where it ends, and min_tokens and ignore_eos are its guide's to see to
        stops = info.eos_ids
    if len(stops) > MAX_STOP_IDS:
        raise InvalidRequest(
            f"stop_token_ids may hold at most {MAX_STOP_IDS - len(info.eos_ids)} ids",
            param="stop_token_ids",
        )
    wanted = info.max_context if params.max_tokens is None else len(prompt) + params.max_tokens
    return Sequence(
        request=dataclasses.replace(request, sampling=params),
        arrival=arrival,
        limit=min(wanted, info.max_context),
        seed=_seed(request.id) if params.seed is None else _signed(params.seed),
        added_at=time.monotonic(),
        tokens=prompt.astype(np.int32),
        stop_ids=np.array(stops, dtype=np.int32),
        edits=edits_of(params, len(prompt), () if guided else stops, masked=guided),
    )


def _reader(request: Request, prompt: NDArray[np.integer[Any]], info: ModelInfo, arrival: int) -> Sequence:
    """A sequence that ends with its prompt. One token is sampled, whose coming says that all has been computed."""
    if len(prompt) > info.max_context:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; at most {info.max_context} fit the context",
            param="prompt",
            code="context_length_exceeded",
        )
    return Sequence(
        request=dataclasses.replace(request, sampling=_PLAIN, stream=False),
        arrival=arrival,
        limit=len(prompt) + 1,
        seed=0,
        added_at=time.monotonic(),
        tokens=prompt.astype(np.int32),
    )


def _check_reading(request: Request, prompt_len: int) -> None:
    need_from, likeliest = request.need_from, request.prompt_logprobs
    inside = need_from is None or 0 <= need_from < prompt_len
    _require(inside, "need_from", f"need_from must be a position of the prompt, from 0 to {prompt_len - 1}")
    _require(
        0 <= likeliest <= MAX_LOGPROBS,
        "prompt_logprobs",
        f"prompt_logprobs must lie in [0, {MAX_LOGPROBS}]",
    )
    if request.outputs is Outputs.LOGPROBS:
        _require(
            need_from is not None, "need_from", "need_from is missing: where are log-probabilities to begin?"
        )
    if request.outputs is Outputs.VECTOR:
        _require(need_from is None, "need_from", "need_from does not go with a vector")


def _resolve(params: SamplingParams, info: ModelInfo) -> SamplingParams:
    """The request's own values, else the model's defaults, else the field's."""
    defaults = info.sampling

    def pick(name: str, own: float | None, otherwise: float) -> float:
        return own if own is not None else defaults.get(name, otherwise)

    resolved = dataclasses.replace(
        params,
        temperature=pick("temperature", params.temperature, 1.0),
        top_p=pick("top_p", params.top_p, 1.0),
        top_k=int(pick("top_k", params.top_k, 0)),
        min_p=pick("min_p", params.min_p, 0.0),
        repetition_penalty=pick("repetition_penalty", params.repetition_penalty, 1.0),
    )
    _check_ranges(resolved)
    return resolved


def _check_ranges(params: SamplingParams) -> None:
    temperature, top_p, top_k, min_p = params.temperature, params.top_p, params.top_k, params.min_p
    assert temperature is not None
    assert top_p is not None
    assert top_k is not None
    assert min_p is not None
    _require(0 <= temperature < float("inf"), "temperature", "temperature must be 0 or more")
    _require(0 < top_p <= 1, "top_p", "top_p must lie in (0, 1]")
    _require(top_k >= 0, "top_k", "top_k must be 0 (all) or more")
    _require(0 <= min_p <= 1, "min_p", "min_p must lie in [0, 1]")
    _require(
        params.max_tokens is None or params.max_tokens >= 1, "max_tokens", "max_tokens must be at least 1"
    )
    _require(params.min_tokens >= 0, "min_tokens", "min_tokens must be 0 or more")
    repetition = params.repetition_penalty
    assert repetition is not None
    _require(0 < repetition < float("inf"), "repetition_penalty", "repetition_penalty must be above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        _require(abs(getattr(params, name)) < float("inf"), name, f"{name} must be a finite number")
    wanted = params.logprobs
    _require(
        wanted is None or 0 <= wanted <= MAX_LOGPROBS, "logprobs", f"logprobs must lie in [0, {MAX_LOGPROBS}]"
    )


def _check_guided(request: Request) -> None:
    """Refuse what a grammar contradicts."""
    params = request.sampling
    for name, given in (
        ("allowed_token_ids", params.allowed_token_ids),
        ("banned_token_ids", params.banned_token_ids),
        ("bad_words", params.bad_words),
        ("stream", request.stream),
    ):
        _require(not given, name, f"{name} does not go with a grammar, which says what may come")


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    allowed, words = params.allowed_token_ids, params.bad_words
    _require(allowed is None or len(allowed) > 0, "allowed_token_ids", "allowed_token_ids must not be empty")
    _require(all(words), "bad_words", "bad_words must hold at least one token each")
    for param, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", allowed or ()),
        ("banned_token_ids", params.banned_token_ids),
        ("bad_words", [token for word in words for token in word]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        inside = all(0 <= token < vocab_size for token in ids)
        _require(inside, param, f"the token ids of {param} must lie in [0, {vocab_size})")


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(message, param=param)


def _seed(request_id: str) -> int:
    """A seed that a replayed request finds again."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(seed: int) -> int:
    """Any integer as the 64-bit pattern of its low bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
