"""Text in, text out: tokenizer, engine and detokenizer behind one small interface.

``TextEngine`` is what the worker and ``headrace generate`` talk to; ``LocalTextEngine`` drives an engine in this
process or in a child of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.engine.request import EngineStats, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt: exactly one of ``prompt``, ``prompt_token_ids``, ``messages``.

    stop: strings that end the text; the earliest completing one wins and is left out. Other fields as in Request.
    """

    id: str
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    priority: int = 0
    deadline: float | None = None
    salt: str = ""


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request was not run: stable ``code``, a sentence for people, the field at fault."""

    code: str
    message: str
    param: str | None = None
    retriable: bool = False


@dataclass(frozen=True, slots=True)
class TextChoice:
    """One answer. stop_reason: the stop string or stop token id that ended it, if any."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """How one TextRequest ended: choices, or an error. Times in seconds from ``add_many``."""

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


class TextEngine(Protocol):
    """What a worker needs of an engine. Calls come from one thread."""

    model: str
    max_context: int

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
