"""From what the engine generated to the answers of a request: text cut at its stop string, choices in their order."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.engine.chat import ChatFormat, Said, ToolCall
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.request import Completion, FinishReason, SamplingParams
from headrace.engine.stop import StopHit, StopWatch
from headrace.engine.token_logprobs import TokenLogprob, told
from headrace.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextRequest


@dataclass(frozen=True, slots=True)
class TextChoice:
    """One answer. stop_reason: the stop string or stop token id that ended it, if any. logprobs: where asked for.

    reasoning: what a model that thinks thought before ``text``. tool_calls: what it called, not part of ``text``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: list[TokenLogprob] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class Answer:
    """One of a request's answers while the engine makes it. Only one with stop strings is watched as it comes."""

    def __init__(
        self,
        request: "TextRequest",
        index: int,
        prompt: list[int],
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
    ) -> None:
        shown = frozenset[int]() if request.messages is None else chat_format.shown_ids(request.chat)

        def detokenizer() -> Detokenizer:
            return Detokenizer(tokenizer, prompt, skip_special=request.skip_special_tokens, shown=shown)

        self.request_id = request.id
        self._request = request
        self._prompt = prompt
        self._chat_format = chat_format
        self.index = index
        self.watch: StopWatch | None = None
        if request.stop and request.grammar is None:
            self.watch = StopWatch(
                detokenizer(),
                request.stop,
                request.sampling.min_tokens,
                include=request.sampling.include_stop,
            )
        self._detokenizer = detokenizer()
        self._pieces = tokenizer.pieces(skip_special=False)
        self._before = _echo(request, prompt, tokenizer) if request.echo else ""

    def feed(self, tokens: list[int]) -> StopHit | None:
        """Look at the next tokens; the hit, when these complete a stop string."""
        if self.watch is None or self.watch.hit:
            return None
        return self.watch.feed(tokens)

    def choice(self, done: Completion) -> TextChoice:
        """The answer, now that the engine is done with it."""
        tokens, reason = done.token_ids, done.finish_reason
        stop_reason: str | int | None = done.stop_reason
        hit = None
        if self.watch and (self.watch.hit or reason is not FinishReason.ABORT):
            # Tokens may arrive together with the end, or an end of the engine's own may overtake ours.
            self.watch.feed(tokens[self.watch.tokens :])
            hit = self.watch.close()
        if hit:
            tokens, reason, stop_reason = tokens[: hit.tokens], FinishReason.STOP, hit.stop
        text = self._detokenizer.feed(tokens) + self._detokenizer.close()
        if hit:
            text = text[: hit.chars]
        logprobs = None if done.logprobs is None else told(tokens, done.logprobs, self._pieces)
        said = self._take_apart(text, done.id)
        if said.tool_calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        return TextChoice(
            index=self.index,
            text=self._before + said.text,
            token_ids=tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
        )

    def _take_apart(self, text: str, seed: str) -> Said:
        """What of the text is thought, call and answer: of a chat alone, since its template says what to look for."""
        request = self._request
        if request.messages is None:
            return Said(text)
        thinking = self._chat_format.thinking(self._prompt, request.messages, request.chat)
        return self._chat_format.read(text, request.chat, thinking=thinking, seed=seed)


@dataclass(slots=True)
class Answers:
    """A request's answers: how many are awaited, and those that have ended, with what the engine made of each.

    waited_s: from ``add_many`` until the engine got the request.
    """

    request: "TextRequest"
    prompt: list[int]
    awaited: int
    ended: list[tuple[Answer, Completion]] = field(default_factory=list)
    waited_s: float = 0.0


def engine_ids(request: "TextRequest") -> list[str]:
    """The ids under which the engine knows a request's answers: the first is the request's own."""
    parts = request.continuations or request.inputs
    count = request.n if parts is None else len(parts)
    return [request.id, *(f"{request.id}#{index}" for index in range(1, count))]


def prompt_logprobs_of(request: "TextRequest") -> int | None:
    """Of how many of the likeliest tokens the log-probabilities of the prompt's places are needed; None: of none."""
    echoed = request.sampling.logprobs if request.echo else None
    wanted = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """The request's sampling, for its answer of this index: each has a seed of its own, the first the request's.

    Where the request has none, the engine makes one of the id, which differs too.
    """
    if not index or sampling.seed is None:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}#{index}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little", signed=True))


def _echo(request: "TextRequest", prompt: list[int], tokenizer: Tokenizer) -> str:
    """The prompt's text. A character that it leaves unfinished is left to the answer, which may complete it."""
    if request.prompt is not None and request.truncate_prompt_tokens is None:
        return request.prompt
    return Detokenizer(tokenizer, skip_special=request.skip_special_tokens).feed(prompt)


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that write these words, at the beginning of a text and after a space."""
    spellings = [
        form for word in words for form in ((word.lstrip(), f" {word.lstrip()}") if word.strip() else (word,))
    ]
    return tuple(dict.fromkeys(map(tuple, tokenizer.encode_rendered(spellings))))
