"""What goes into the engine and what comes out: token ids, a sampling record and a caller's id."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import InvalidRequest
from headrace.engine.grammar import Grammar


class FinishReason(StrEnum):
    """Why a sequence ended. Names are OpenAI's; ``abort`` is ours. ``tool_calls`` is the text side's word for a stop."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. ``None`` means the model's own default (generation_config.json), else the one given here.

    temperature: 0 is greedy (default 1.0). top_p in (0, 1] (default 1.0). top_k >= 1, or 0 for all (default 0).
    min_p in [0, 1] (default 0). max_tokens: at most this many new tokens (default: what the context leaves).
    min_tokens: no stop before this many. seed: any 64-bit integer; without one it is made from the request's id, so
    a replayed job gives the same answer. stop_token_ids: end the sequence besides the model's own end tokens.
    ignore_eos: do not stop at the model's end tokens. include_stop: keep the token that ended the sequence.

    repetition_penalty > 0 (default 1.0) divides positive logits, and multiplies others, of all tokens in prompt and
    answer; presence_penalty and frequency_penalty are subtracted from those in the answer, once and as often as they
    stand there. logit_bias: (token id, what is added to its logit) pairs. allowed_token_ids: no other may come.
    banned_token_ids: none of these may come. bad_words: token sequences that may not be completed, whether they begin in the prompt or in the answer.
    logprobs: report log-probabilities, of the chosen tokens and this many of the likeliest (0 is the chosen alone).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None


class Outputs(StrEnum):
    """What a request is answered with: generated tokens, or what the model makes of the prompt and nothing more."""

    TOKENS = "tokens"
    LOGPROBS = "logprobs"
    VECTOR = "vector"


class Pooling(StrEnum):
    """Which of the prompt's hidden states, after the last norm, make its vector: their mean, the last, the first."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, or one prompt to look at, in token ids (an array is taken over faster than a list).

    priority: lower numbers first; a newcomer preempts only strictly larger numbers. deadline: seconds since the
    epoch, orders requests of one priority (earliest first). stream: report every token as it is sampled (the text side
    asks for it when stop strings must be watched), instead of once at the end. salt separates prefix-cache entries
    that must not be shared.

    need_from: the first position of the prompt whose logits are wanted, which gives log-probabilities of all the
    prompt's tokens after it, and of ``prompt_logprobs`` of the likeliest at each place. Nothing of the prompt from there
    on is taken from the prefix cache. Without it only the last position's logits are computed, to sample from.
    outputs: with ``logprobs`` (which needs need_from) and ``vector`` nothing is generated and ``sampling`` is ignored.
    pooling: how a vector is made.
    grammar: the form that the answer has from its first token to its last. It says where the answer ends: stop_token_ids do
    not count then. Not together with ``stream``, allowed_token_ids, banned_token_ids or bad_words.
    """

    id: str
    prompt: Sequence[int] | NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline: float | None = None
    stream: bool = False
    salt: str = ""
    outputs: Outputs = Outputs.TOKENS
    need_from: int | None = None
    prompt_logprobs: int = 0
    pooling: Pooling = Pooling.LAST
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the text side must know of the model that an engine runs.

    path: its directory. max_context: prompt and answer together, as far as model and KV cache allow. max_slots: how many
    sequences the engine runs at once. sampling: generation_config's defaults.
    """

    path: str
    vocab_size: int
    max_context: int
    max_slots: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    sampling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities of T tokens under the model's own logits, before any option changes those.

    chosen: [T]. top_ids, top: [T, n], the likeliest tokens of each place, falling.
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Completion:
    """How one request ended.

    token_ids: the generated ids, the stop token left out unless ``include_stop``. stop_reason: the stop token's id when one of
    ``stop_token_ids`` ended it. cached_tokens: prompt tokens taken from the prefix cache at first admission.
    preemptions: times it was recomputed. Times are seconds from ``add``: queued until first scheduled, first token
    sampled, finished. logprobs: of ``token_ids``, where asked for. prompt_logprobs: of the prompt's tokens after
    ``need_from``. vector: [H] fp32, the pooled hidden states. Both are None for a request that was aborted.
    error: why it was not run to its end, where that was only found out later (a grammar that cannot be compiled).
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    queued_s: float
    first_token_s: float
    total_s: float
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    vector: NDArray[np.float32] | None = None
    error: InvalidRequest | None = None


@dataclass(slots=True)
class StepOutput:
    """What one or more steps brought: new tokens of ``stream`` requests (id, ids), and requests that ended."""

    tokens: list[tuple[str, list[int]]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.completions)

    def extend(self, other: "StepOutput") -> None:
        """Append another step's output."""
        self.tokens += other.tokens
        self.completions += other.completions


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics and admission. Blocks: free + cached + live = total when idle."""

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_live: int
    block_size: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    wasted_tokens: int

    @property
    def kv_waste(self) -> float:
        """Share of the live blocks' token slots that hold no token: the partial last blocks."""
        live = self.blocks_live * self.block_size
        return self.wasted_tokens / live if live else 0.0
