"""Text in, text out: tokenizer, engine and detokenizer behind the small interface of ``engine/text_engine.py``."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.answers import (
    Answer,
    Answers,
    TextChoice,
    bad_word_ids,
    engine_ids,
    prompt_logprobs_of,
    sampling_of,
)
from headrace.engine.chat import ChatFormat
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineDead, EngineError, InvalidRequest
from headrace.engine.looks import looks, pooled, score
from headrace.engine.prompts import prompt_ids
from headrace.engine.request import (
    Completion,
    EngineStats,
    FinishReason,
    Request,
)
from headrace.engine.text_engine import RequestError as RequestError
from headrace.engine.text_engine import TextCompletion as TextCompletion
from headrace.engine.text_engine import TextEngine as TextEngine
from headrace.engine.text_engine import TextRequest as TextRequest
from headrace.engine.token_logprobs import told_prompt
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import Limits, check_grammar

if TYPE_CHECKING:
    from headrace.engine.token_engine import TokenEngine


log = logging.getLogger(__name__)


class LocalTextEngine:
    """A TextEngine over any TokenEngine: ids go in and come out on its far side, text on this one.

    Text is made when a request ends. Only a request with stop strings is watched token by token; when one of them
    completes, the engine is told to stop there, and what it overshot meanwhile is cut. A defect of ours that a request
    meets on its way in or out ends it with an ``internal_error``, and harms no other.

    tool_form: see ChatFormat. Raises EngineError for an unknown one.
    """

    def __init__(
        self, token_engine: "TokenEngine", tokenizer: Tokenizer, model: str = "", tool_form: str = "auto"
    ) -> None:
        self.model = model
        self.max_context = token_engine.info.max_context
        self.max_slots = token_engine.info.max_slots
        self._engine = token_engine
        self._tokenizer = tokenizer
        self._chat_format = ChatFormat(tokenizer, tool_form)
        vocab_size = token_engine.info.vocab_size
        tokenizer.cover(vocab_size)
        self._limits = Limits(self.max_context, vocab_size, tokenizer.longest_piece)
        self._running: dict[str, Answer] = {}
        self._answers: dict[str, Answers] = {}
        self._refused: list[TextCompletion] = []

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        """Take requests; each ends in exactly one TextCompletion. A bad one ends with ``error``; none raises."""
        started = time.monotonic()
        prompts = self._prompt_ids(requests)
        accepted: list[str] = []
        parts: list[list[Request]] = []
        for request, prompt in zip(requests, prompts, strict=True):
            try:
                parts.append(self._start(request, prompt))
            except Exception as error:
                self._refuse(request.id, "preparing the request", error)
            else:
                accepted.append(request.id)
        waited = time.monotonic() - started
        for request_id in accepted:
            self._answers[request_id].waited_s = waited
        if accepted:
            self._submit(parts)

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
            completions = map(self._complete, (c for c in output.completions if c.id in self._running))
            ended += [completion for completion in completions if completion]
            if ended or not self._running or time.monotonic() >= deadline:
                return ended

    def abort(self, ids: Sequence[str]) -> None:
        """End these now (finish reason ``abort``); unknown ids are ignored."""
        wanted = set(ids)
        for name, answer in self._running.items() if wanted & self._answers.keys() else ():
            if answer.request_id in wanted:
                self._engine.abort(name)

    def stats(self) -> EngineStats:
        """The latest snapshot; never blocks on a step."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop and release the device. Idempotent."""
        self._engine.close()

    def _prompt_ids(self, requests: Sequence[TextRequest]) -> list[list[int] | InvalidRequest]:
        """Each request's prompt in ids, or what is wrong with the request. After a defect each is read by itself."""
        try:
            return prompt_ids(requests, self._tokenizer, self._chat_format, self._limits)
        except Exception as error:
            if len(requests) == 1:
                return [refusal(requests[0].id, "reading the prompt", error)]
            return [self._prompt_ids([request])[0] for request in requests]

    def _constrained(self, request: TextRequest, prompt: list[int]) -> TextRequest:
        """The request with the grammar that its chat asks for. Raises InvalidRequest for what does not go with that."""
        if request.messages is None or request.looks:
            return request
        thinking = self._chat_format.thinking(prompt, request.messages, request.chat)
        grammar = self._chat_format.grammar(request.chat, request.grammar, thinking=thinking)
        if grammar is request.grammar:
            return request
        request = replace(request, grammar=grammar)
        check_grammar(request)
        return request

    def _start(self, request: TextRequest, prompt: list[int] | InvalidRequest) -> list[Request]:
        """Await the request's answers, and return what the engine has to run for them. Raises InvalidRequest."""
        if isinstance(prompt, InvalidRequest):
            raise prompt
        names = engine_ids(request)
        if taken := [name for name in names if name in self._running]:
            raise _still_running(taken[0])
        request = self._constrained(request, prompt)
        parts = self._token_requests(request, prompt)
        self._running |= {
            name: Answer(request, index, prompt, self._tokenizer, self._chat_format)
            for index, name in enumerate(names)
        }
        self._answers[request.id] = Answers(request, prompt, awaited=len(names))
        return parts

    def _token_requests(self, request: TextRequest, prompt: list[int]) -> list[Request]:
        sampling, names = request.sampling, engine_ids(request)
        if request.looks:
            return looks(request, names, prompt, self._tokenizer, self._limits)
        likeliest = prompt_logprobs_of(request)
        if request.bad_words:
            words = bad_word_ids(request.bad_words, self._tokenizer)
            sampling = replace(sampling, bad_words=(*sampling.bad_words, *words))
        ids = np.array(prompt, np.int32)
        return [
            Request(
                id=name,
                prompt=ids,
                sampling=sampling_of(sampling, index),
                priority=request.priority,
                deadline=request.deadline,
                stream=bool(request.stop) and request.grammar is None,
                salt=request.salt,
                need_from=None if likeliest is None or index else 0,  # once for all answers
                prompt_logprobs=likeliest or 0,
                grammar=request.grammar,
            )
            for index, name in enumerate(names)
        ]

    def _submit(self, parts: list[list[Request]]) -> None:
        """Hand requests to the engine at once; if it refuses, one by one, so that a bad one fails alone."""
        try:
            self._engine.add_many([part for request in parts for part in request])
        except EngineDead:
            raise
        except Exception as error:
            if len(parts) > 1:
                for request in parts:
                    self._submit([request])
                return
            request_id = parts[0][0].id
            self._forget(request_id)
            self._refuse(request_id, "handing the request to the engine", error)

    def _refuse(self, request_id: str, doing: str, error: Exception) -> None:
        self._refused.append(_failed(request_id, refusal(request_id, doing, error)))

    def _forget(self, request_id: str) -> None:
        """Await no more answers to the request."""
        for name in engine_ids(self._answers.pop(request_id).request):
            self._running.pop(name, None)

    def _look_for_stop(self, name: str, tokens: list[int]) -> None:
        answer = self._running.get(name)
        if answer is None:
            return
        try:
            hit = answer.feed(tokens)
        except Exception as error:
            self.abort([answer.request_id])
            self._forget(answer.request_id)
            self._refuse(answer.request_id, "reading the answer", error)
            return
        if hit:
            self._engine.finish(name, hit.tokens)

    def _complete(self, done: Completion) -> TextCompletion | None:
        """The request's completion, if this answer was the last one awaited."""
        answer = self._running.pop(done.id)
        answers = self._answers[answer.request_id]
        answers.ended.append((answer, done))
        if len(answers.ended) < answers.awaited:
            if done.error is not None:  # its other answers are of no use
                self.abort([answer.request_id])
            return None
        del self._answers[answer.request_id]
        if error := next((part.error for _, part in answers.ended if part.error), None):
            return _failed(answer.request_id, error)
        try:
            return self._completion(answers)
        except Exception as error:
            return _failed(answer.request_id, refusal(answer.request_id, "reading the answer", error))

    def _completion(self, answers: Answers) -> TextCompletion:
        """All answers in their order. The prompt counts once, as the first of them met it."""
        request, prompt = answers.request, answers.prompt
        ended = sorted(answers.ended, key=lambda pair: pair[0].index)
        choices = [answer.choice(done) for answer, done in ended]
        parts = [done for _, done in ended]
        completion = _ended(answers, choices, parts)
        read = parts[0].prompt_logprobs
        if completion.aborted:
            return completion
        if request.continuations is not None:
            scores = [score(part) for part in parts]
            tokens = len(prompt) + sum(score.tokens for score in scores)
            return replace(completion, choices=[], prompt_tokens=tokens, scores=scores)
        if request.pooling is not None:
            vectors = [pooled(part, normalize=request.normalize) for part in parts]
            tokens = sum(part.prompt_tokens for part in parts)
            cached = sum(part.cached_tokens for part in parts)
            return replace(
                completion, choices=[], vectors=vectors, prompt_tokens=tokens, cached_tokens=cached
            )
        if read is None:
            return completion
        pieces = self._tokenizer.pieces(skip_special=False)
        if request.echo and request.sampling.logprobs is not None:
            echoed = told_prompt(prompt, read, request.sampling.logprobs, pieces)
            choices = [replace(choice, logprobs=echoed + (choice.logprobs or [])) for choice in choices]
            completion = replace(completion, choices=choices)
        if request.prompt_logprobs is not None:
            told = told_prompt(prompt, read, request.prompt_logprobs, pieces)
            completion = replace(completion, prompt_logprobs=told)
        return completion


def _ended(answers: Answers, choices: list[TextChoice], parts: list[Completion]) -> TextCompletion:
    return TextCompletion(
        id=answers.request.id,
        choices=choices,
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        completion_tokens=sum(len(choice.token_ids) for choice in choices),
        preemptions=sum(part.preemptions for part in parts),
        queued_s=answers.waited_s + min(part.queued_s for part in parts),
        first_token_s=answers.waited_s + min(part.first_token_s for part in parts),
        total_s=answers.waited_s + max(part.total_s for part in parts),
        aborted=any(part.finish_reason is FinishReason.ABORT for part in parts),
    )


def _failed(request_id: str, error: InvalidRequest) -> TextCompletion:
    return TextCompletion(request_id, [], error=reason(error))


def reason(error: InvalidRequest) -> RequestError:
    """The refusal, as a completion has it."""
    return RequestError(error.code, error.message, error.param)


def refusal(whose: str, doing: str, error: Exception) -> InvalidRequest:
    """What to tell of an error that one request met: a refusal as it is, of a defect of ours no more than its class."""
    if isinstance(error, InvalidRequest):
        return error
    name = type(error).__name__
    log.error("%s failed for %s: %s", doing, whose, name)
    log.debug("where", exc_info=error)  # not above: the message may quote the request or the answer
    if isinstance(error, MemoryError):  # no fault of the request's: others will have given some back
        return InvalidRequest(f"{doing} found no memory left", code="out_of_memory")
    return InvalidRequest(f"{doing} failed with {name}", code="internal_error")


def _still_running(request_id: str) -> InvalidRequest:
    return InvalidRequest(f"id {request_id!r} is already running", param="id", code="duplicate_id")


def open_text_engine(config: EngineConfig, in_process: bool = False) -> LocalTextEngine:
    """Load a model and serve text with it: in a child process, so that nothing here holds up a step, or in this one.

    Raises EngineError for a model that cannot be found, read or run.
    """
    from headrace.engine.hub import resolve

    directory = resolve(config.model)
    tokenizer = Tokenizer.load(directory, read_template(config.chat_template))
    token_engine: TokenEngine
    if in_process:
        from headrace.engine.engine import Engine

        token_engine = Engine(config)
    else:
        from headrace.engine.process import EngineProcess

        token_engine = EngineProcess(config)
    return LocalTextEngine(token_engine, tokenizer, model=config.model, tool_form=config.tool_form)


def read_template(path: str | None) -> str | None:
    """The text of a chat template's file, if one is named. Raises EngineError."""
    try:
        return None if path is None else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EngineError(
            f"chat_template: {path} cannot be read ({why}): name a file with a Jinja template"
            " (HEADRACE_CHAT_TEMPLATE), or none for the model's own"
        ) from error
