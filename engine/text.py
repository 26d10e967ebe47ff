"""Text in, text out: tokenizer, engine and detokenizer behind one small interface.

``TextEngine`` is what the worker and ``headrace generate`` talk to; ``LocalTextEngine`` drives an engine in this
process or in a child of its own.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine.config import EngineConfig
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.errors import InvalidRequest
from headrace.engine.prompts import prompt_ids
from headrace.engine.request import Completion, EngineStats, FinishReason, Request, SamplingParams
from headrace.engine.stop import StopWatch
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import Limits

if TYPE_CHECKING:
    from headrace.engine.token_engine import TokenEngine


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


@dataclass(slots=True)
class _Running:
    """What is kept of a request while the engine has it. waited_s: from ``add_many`` until the engine got it."""

    detokenizer: Detokenizer
    watch: StopWatch | None
    waited_s: float = 0.0


class LocalTextEngine:
    """A TextEngine over any TokenEngine: ids go in and come out on its far side, text on this one.

    Text is made when a request ends. Only a request with stop strings is watched token by token; when one of them
    completes, the engine is told to stop there, and what it overshot meanwhile is cut.
    """

    def __init__(self, token_engine: "TokenEngine", tokenizer: Tokenizer, model: str = "") -> None:
        self.model = model
        self.max_context = token_engine.info.max_context
        self._engine = token_engine
        self._tokenizer = tokenizer
        vocab_size = token_engine.info.vocab_size
        tokenizer.cover(vocab_size)
        self._limits = Limits(self.max_context, vocab_size, tokenizer.longest_piece)
        self._running: dict[str, _Running] = {}
        self._refused: list[TextCompletion] = []

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        """Take requests; each ends in exactly one TextCompletion. A bad one ends with ``error``; none raises."""
        started = time.monotonic()
        accepted: list[Request] = []
        for request, prompt in zip(
            requests, prompt_ids(requests, self._tokenizer, self._limits), strict=True
        ):
            if isinstance(prompt, InvalidRequest):
                self._refuse(request.id, prompt)
            elif request.id in self._running:
                self._refuse(request.id, _still_running(request.id))
            else:
                self._running[request.id] = self._start(request, prompt)
                accepted.append(_token_request(request, prompt))
        waited = time.monotonic() - started
        for token_request in accepted:
            self._running[token_request.id].waited_s = waited
        if accepted:
            self._submit(accepted)

    def poll(self, timeout: float) -> list[TextCompletion]:
        """Completions since the last call, waiting up to ``timeout`` seconds for the first. Raises EngineDead.

        With nothing running there is nothing to wait for: an engine in this process returns at once.
        """
        deadline = time.monotonic() + timeout
        while True:
            wait = 0.0 if self._refused else max(0.0, deadline - time.monotonic())
            output = self._engine.poll(wait)
            for request_id, tokens in output.tokens:
                self._look_for_stop(request_id, tokens)
            ended, self._refused = self._refused, []
            ended += [self._complete(c) for c in output.completions if c.id in self._running]
            if ended or not self._running or time.monotonic() >= deadline:
                return ended

    def abort(self, ids: Sequence[str]) -> None:
        """End these now (finish reason ``abort``); unknown ids are ignored."""
        for request_id in ids:
            if request_id in self._running:
                self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        """The latest snapshot; never blocks on a step."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop and release the device. Idempotent."""
        self._engine.close()

    def _start(self, request: TextRequest, prompt: list[int]) -> _Running:
        detokenizer = Detokenizer(self._tokenizer, prompt)
        if not request.stop:
            return _Running(detokenizer, None)
        watched = Detokenizer(self._tokenizer, prompt)
        return _Running(detokenizer, StopWatch(watched, request.stop, request.sampling.min_tokens))

    def _submit(self, requests: list[Request]) -> None:
        """Hand requests to the engine at once; if it refuses, one by one, so that a bad one fails alone."""
        try:
            self._engine.add_many(requests)
        except InvalidRequest as error:
            if len(requests) > 1:
                for request in requests:
                    self._submit([request])
            else:
                del self._running[requests[0].id]
                self._refuse(requests[0].id, error)

    def _refuse(self, request_id: str, error: InvalidRequest) -> None:
        reason = RequestError(error.code, error.message, error.param)
        self._refused.append(TextCompletion(request_id, [], error=reason))

    def _look_for_stop(self, request_id: str, tokens: list[int]) -> None:
        run = self._running.get(request_id)
        if run and run.watch and not run.watch.hit and (hit := run.watch.feed(tokens)):
            self._engine.finish(request_id, hit.tokens)

    def _complete(self, done: Completion) -> TextCompletion:
        run = self._running.pop(done.id)
        tokens, reason = done.token_ids, done.finish_reason
        stop_reason: str | int | None = done.stop_reason
        hit = None
        if run.watch and (run.watch.hit or reason is not FinishReason.ABORT):
            # Tokens may arrive together with the end, or an end of the engine's own may overtake ours.
            run.watch.feed(tokens[run.watch.tokens :])
            hit = run.watch.close()
        if hit:
            tokens, reason, stop_reason = tokens[: hit.tokens], FinishReason.STOP, hit.stop
        text = run.detokenizer.feed(tokens) + run.detokenizer.close()
        choice = TextChoice(0, text[: hit.chars] if hit else text, tokens, reason, stop_reason)
        return TextCompletion(
            id=done.id,
            choices=[choice],
            prompt_tokens=done.prompt_tokens,
            cached_tokens=done.cached_tokens,
            completion_tokens=len(tokens),
            preemptions=done.preemptions,
            queued_s=run.waited_s + done.queued_s,
            first_token_s=run.waited_s + done.first_token_s,
            total_s=run.waited_s + done.total_s,
        )


def _still_running(request_id: str) -> InvalidRequest:
    return InvalidRequest(f"id {request_id!r} is already running", param="id", code="duplicate_id")


def _token_request(request: TextRequest, prompt: list[int]) -> Request:
    return Request(
        id=request.id,
        prompt=prompt,
        sampling=request.sampling,
        priority=request.priority,
        deadline=request.deadline,
        stream=bool(request.stop),
        salt=request.salt,
    )


def open_text_engine(config: EngineConfig, in_process: bool = False) -> LocalTextEngine:
    """Load a model and serve text with it: in a child process, so that nothing here holds up a step, or in this one.

    Raises EngineError for a model that cannot be found, read or run.
    """
    from headrace.engine.hub import resolve

    directory = resolve(config.model)
    tokenizer = Tokenizer.load(directory)
    token_engine: TokenEngine
    if in_process:
        from headrace.engine.engine import Engine

        token_engine = Engine(config)
    else:
        from headrace.engine.process import EngineProcess

        token_engine = EngineProcess(config)
    return LocalTextEngine(token_engine, tokenizer, model=config.model)
