"""Grammars made ready to use, off the hot path: checked within a time limit, compiled in threads, kept for the next request."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.closing import Closing, Patience
from headrace.engine.errors import EngineError, InvalidRequest
from headrace.engine.grammar import Grammar
from headrace.engine.grammar_check import GrammarChecker, GrammarTooComplex
from headrace.engine.guide import Guide
from headrace.engine.panics import LibraryPanic, panics_as_errors
from headrace.engine.request import ModelInfo
from headrace.engine.sequence import Sequence

LIMIT_S = 5.0
"""Processor time that checking one grammar may take."""

MAX_CACHED = 256
"""Compiled grammars that are kept, the least recently used going first; refused ones among them."""

LONGEST_WAY = 16384
"""Tokens of the short answer that is looked for once for each grammar."""

_THREADS = 2
_HOST_ERRORS = (MemoryError, OSError)
"""No memory, no process or no file is left: nothing that a grammar is to blame for."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as grammars see them. tokenizer: an ``LLTokenizer``."""

    tokenizer: Any
    closing: Closing


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """matcher: at the beginning; guides get copies. way: a short answer, in tokens, None if none was found.

    least: tokens that every answer has at least. A limit is refused for this alone: an answer shorter than ``way`` may exist.
    """

    matcher: Any
    closing: Closing
    way: list[int] | None
    least: int


class Grammars:
    """Gives sequences their guides. Nothing is loaded or started before the first grammar.

    Sequences go in by ``prepare`` and come out of ``ready``, in any order.
    """

    def __init__(
        self,
        info: ModelInfo,
        load: Callable[[ModelInfo], Vocabulary] | None = None,
        *,
        limit_s: float = LIMIT_S,
        max_cached: int = MAX_CACHED,
    ) -> None:
        self._info = info
        self._load = load or load_vocabulary
        self._limit_s = limit_s
        self._max_cached = max_cached
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._waiting: list[tuple[Sequence, Future[CompiledGrammar]]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._checkers: list[GrammarChecker] = []
        self._own = threading.local()

    def prepare(self, sequences: Collection[Sequence]) -> None:
        """Begin to make the guides of these sequences, which have grammars: of all, or of none if this raises."""
        futures = [self._compiled(seq.request.grammar) for seq in sequences if seq.request.grammar]
        self._waiting += zip(sequences, futures, strict=True)

    def ready(self) -> list[tuple[Sequence, InvalidRequest | None]]:
        """Sequences whose guide has been made, or could not be and why."""
        if not self._waiting:
            return []
        done = [pair for pair in self._waiting if pair[1].done()]
        self._waiting = [pair for pair in self._waiting if not pair[1].done()] if done else self._waiting
        return [(seq, self._guide(seq, future)) for seq, future in done]

    def wait(self, timeout: float) -> None:
        """Return when one is ready, or after so many seconds; at once when none is awaited."""
        if self._waiting:
            wait([future for _, future in self._waiting], timeout, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """End threads and processes."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for checker in self._checkers:
                checker.close()

    def _guide(self, seq: Sequence, future: "Future[CompiledGrammar]") -> InvalidRequest | None:
        """Give the sequence its guide; or say why it cannot have one."""
        grammar, params = seq.request.grammar, seq.request.sampling
        assert grammar is not None
        if (error := future.exception()) is not None:
            return _refusal(error, grammar, self._limit_s)
        compiled = future.result()
        room = seq.limit - seq.prompt_len
        if compiled.least > room:
            return InvalidRequest(
                f"max_tokens must leave room for an answer of this form, which has at least {compiled.least:,} tokens: with the"
                f" context it leaves {room:,}",
                param="max_tokens",
                code="invalid_value",
            )
        try:
            with panics_as_errors:
                matcher = compiled.matcher.deep_copy()
        except LibraryPanic as panic:
            return _refusal(panic, grammar, self._limit_s)
        seq.guide = Guide(
            matcher,
            compiled.closing,
            length=seq.prompt_len,
            limit=seq.limit,
            may_end_at=seq.limit if params.ignore_eos else seq.prompt_len + params.min_tokens,
            end_tokens=self._info.eos_ids,
            thoughts=grammar.thoughts,
        )
        if compiled.way is not None and len(compiled.way) <= room:
            seq.guide.start(compiled.way)
        return None

    def _compiled(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        key = grammar.named("")  # whichever field it came from
        if key not in self._cache or _may_pass(self._cache[key]):
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "grammar")
            self._cache[key] = self._threads.submit(self._compile, grammar)
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """In a thread: check, then compile. Raises BadGrammar, GrammarTooComplex, and what may pass: MemoryError, OSError."""
        from headrace.engine.guidance import compile_matcher

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._load(self._info)
        vocabulary = self._vocabulary
        closing = vocabulary.closing
        least_chars = self._checker().check(grammar)
        matcher = compile_matcher(vocabulary.tokenizer, grammar)
        way = closing.way(matcher, LONGEST_WAY, Patience(LONGEST_WAY, filling=least_chars), grammar.thoughts)
        least = max(-(-least_chars // closing.longest), closing.fewest(matcher))
        return CompiledGrammar(matcher, closing, way, least)

    def _checker(self) -> GrammarChecker:
        """This thread's own."""
        if not hasattr(self._own, "checker"):
            self._own.checker = GrammarChecker(self._limit_s)
            self._checkers.append(self._own.checker)
        checker: GrammarChecker = self._own.checker
        return checker


def _may_pass(future: "Future[CompiledGrammar]") -> bool:
    """Whether it failed for what the host lacked, so that the next request with this grammar deserves another try."""
    return future.done() and isinstance(future.exception(), _HOST_ERRORS)


def _refusal(error: BaseException, grammar: Grammar, limit_s: float) -> InvalidRequest:
    from headrace.engine.guidance import BadGrammar

    if isinstance(error, _HOST_ERRORS):
        lacked = f"compiling {grammar.param} found no memory or no process left ({type(error).__name__})"
        return InvalidRequest(lacked, code="out_of_memory")
    if isinstance(error, BadGrammar):
        problem, code = f"cannot be compiled: {error}", "invalid_grammar"
    elif isinstance(error, GrammarTooComplex):
        problem = f"is too complex: it takes more than {limit_s:g} s, or too much memory, to compile"
        code = "grammar_too_complex"
    elif isinstance(error, EngineError):
        problem, code = f"cannot be used with this model: {error}", "unsupported_option"
    else:  # what llguidance does not foresee, a panic for one, is no reason to end the engine
        problem, code = f"cannot be compiled: {type(error).__name__}", "invalid_grammar"
    return InvalidRequest(f"{grammar.param} {problem}", param=grammar.param, code=code)


def load_vocabulary(info: ModelInfo) -> Vocabulary:
    """The vocabulary of the model's own tokenizer. Raises EngineError when there is none that can be used."""
    import llguidance

    from headrace.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(info.path))
    tokenizer.cover(info.vocab_size)
    try:
        loaded = llguidance.LLTokenizer(
            _within(tokenizer.to_json(), info.vocab_size),
            n_vocab=info.vocab_size,
            eos_token=list(info.eos_ids) or None,
        )
    except ValueError as error:
        raise EngineError(f"its tokenizer has no form that grammars can follow: {error}") from error
    return Vocabulary(loaded, Closing(tokenizer.pieces()[: info.vocab_size]))


def _within(tokenizer: str, vocab_size: int) -> str:
    """A tokenizer's JSON without added tokens that the model has no ids for: one for padding, often."""
    spec = json.loads(tokenizer)
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < vocab_size]
    return json.dumps(spec)
