"""What whoever wants text needs of an engine: requests, completions, and the calls between.

``LocalTextEngine`` in ``engine/text.py`` is the engine itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.engine.answers import TextChoice
from headrace.engine.chat import ChatOptions
from headrace.engine.grammar import Grammar
from headrace.engine.looks import Score
from headrace.engine.request import EngineStats, Pooling, SamplingParams
from headrace.engine.token_logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt: exactly one of ``prompt``, ``prompt_token_ids``, ``messages``; or ``inputs``, several to pool.

    stop: strings that end the text; the earliest completing one wins and is left out, unless ``sampling.include_stop``.
    bad_words: texts that may not be completed. n: how many answers, each with a seed of its own. truncate_prompt_tokens:
    only the prompt's last so many are used. echo: the prompt's text stands before the answer's. chat: how messages are
    put to the model. prompt_logprobs: log-probabilities of the prompt's tokens too, and of so many of the likeliest.
    grammar: the form of the answer, which says where it ends; stop strings and stop token ids end it nowhere else. Other
    fields as in Request.

    Two kinds of request look at the prompt, and generate nothing. continuations: texts or token ids, each scored as what
    comes after the prompt. pooling: the prompt's hidden states as one vector, of length 1 if ``normalize``; of each of
    ``inputs``, texts or token ids, where these stand in the prompt's place.
    """

    id: str
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    inputs: Sequence[str | Sequence[int]] | None = None
    chat: ChatOptions = field(default_factory=ChatOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    n: int = 1
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    continuations: Sequence[str | Sequence[int]] | None = None
    pooling: Pooling | None = None
    normalize: bool = True
    grammar: Grammar | None = None
    priority: int = 0
    deadline: float | None = None
    salt: str = ""

    @property
    def looks(self) -> bool:
        """Whether it only looks at the prompt."""
        return self.continuations is not None or self.pooling is not None


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request was not run: stable ``code``, a sentence for people, the field at fault."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """How one TextRequest ended: choices, or what it looked for, or an error. Times in seconds from ``add_many``.

    prompt_logprobs: of each of the prompt's tokens. scores: of the continuations, in their order. vectors: [H] fp32
    each, of the prompt or of the inputs in their order.
    """

    id: str
    choices: list[TextChoice]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    error: RequestError | None = None
    aborted: bool = False
    prompt_logprobs: list[TokenLogprob] | None = None
    scores: list[Score] | None = None
    vectors: list[NDArray[np.float32]] | None = None


class TextEngine(Protocol):
    """What a worker needs of an engine. Calls come from one thread.

    max_context: prompt and answer together, in tokens. max_slots: sequences that run at once.
    """

    model: str
    max_context: int
    max_slots: int

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        """Take requests; each ends in exactly one TextCompletion. A bad one ends with ``error``; none raises."""

    def poll(self, timeout: float) -> list[TextCompletion]:
        """Completions since the last call, waiting up to ``timeout`` seconds for the first. Raises EngineDead."""

    def abort(self, ids: Sequence[str]) -> None:
        """End these now (finish reason ``abort``); unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """The latest snapshot; never blocks on a step."""

    def close(self) -> None:
        """Stop and release the device. Idempotent."""
