"""What a text request may ask for. Each rule names its field and says what is allowed.

Everything is checked before any token is made, so that a bad request costs its neighbours nothing. Codes are those of
``ErrorCode``: ``missing_field``, ``invalid_type``, ``invalid_value``, ``invalid_text``, ``no_chat_template``,
``context_length_exceeded``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.edits import MAX_LISTED
from headrace.engine.errors import InvalidRequest
from headrace.engine.grammar import MAX_GRAMMAR_CHARS
from headrace.engine.intake import MAX_LOGPROBS
from headrace.engine.request import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextRequest

# As the wire has them, in schemas/: a test compares.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 24  # the engine keeps 32 a sequence, the model's own end tokens among them
MAX_BAD_WORDS = 128
MAX_CHOICES = 128
MAX_CONTINUATIONS = 1024
MAX_INPUTS = 2048
PROMPT_FORMS = ("prompt", "prompt_token_ids", "messages", "inputs")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take. longest_piece: bytes of its longest token."""

    max_context: int
    vocab_size: int
    longest_piece: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One option: ``right_type`` and ``in_range`` together say what ``allowed`` says in words."""

    param: str
    allowed: str
    right_type: Callable[[Any], bool]
    in_range: Callable[[Any], bool]

    def check(self, value: Any) -> None:
        """Raise InvalidRequest unless the value is allowed."""
        if not self.right_type(value):
            raise _invalid(self.param, f"must be {self.allowed}, not {_shown(value)}", "invalid_type")
        if not self.in_range(value):
            raise _invalid(self.param, f"must be {self.allowed}, not {_shown(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


# An option left at None is the model's default, and is not checked.
SAMPLING_RULES = (
    Rule("temperature", "a number from 0 to 2", _is_number, lambda v: 0 <= v <= 2),
    Rule("top_p", "a number above 0 and up to 1", _is_number, lambda v: 0 < v <= 1),
    Rule("top_k", "a whole number, 1 or more; 0 keeps all tokens", _is_integer, lambda v: 0 <= v < 2**31),
    Rule("min_p", "a number from 0 to 1", _is_number, lambda v: 0 <= v <= 1),
    Rule("max_tokens", f"a whole number from 1 to {2**31 - 1:,}", _is_integer, lambda v: 1 <= v < 2**31),
    Rule("min_tokens", "a whole number, 0 or more", _is_integer, lambda v: 0 <= v < 2**31),
    Rule("seed", "a whole number from -2^63 to 2^63 - 1", _is_integer, lambda v: -(2**63) <= v < 2**63),
    Rule("ignore_eos", "true or false", _is_boolean, lambda v: True),
    Rule("include_stop", "true or false", _is_boolean, lambda v: True),
    Rule("repetition_penalty", "a number above 0 and up to 10", _is_number, lambda v: 0 < v <= 10),
    Rule("presence_penalty", "a number from -2 to 2", _is_number, lambda v: -2 <= v <= 2),
    Rule("frequency_penalty", "a number from -2 to 2", _is_number, lambda v: -2 <= v <= 2),
    Rule(
        "logprobs", f"a whole number from 0 to {MAX_LOGPROBS}", _is_integer, lambda v: 0 <= v <= MAX_LOGPROBS
    ),
)
REQUEST_RULES = (
    Rule("n", f"a whole number from 1 to {MAX_CHOICES}", _is_integer, lambda v: 1 <= v <= MAX_CHOICES),
    Rule("truncate_prompt_tokens", "a whole number, 1 or more", _is_integer, lambda v: 1 <= v < 2**31),
    Rule("skip_special_tokens", "true or false", _is_boolean, lambda v: True),
    Rule("echo", "true or false", _is_boolean, lambda v: True),
    Rule(
        "prompt_logprobs",
        f"a whole number from 0 to {MAX_LOGPROBS}",
        _is_integer,
        lambda v: 0 <= v <= MAX_LOGPROBS,
    ),
    Rule("normalize", "true or false", _is_boolean, lambda v: True),
)
BIAS = Rule("logit_bias", "numbers from -100 to 100", _is_number, lambda v: -100 <= v <= 100)
PRIORITY = Rule("priority", "a whole number of 32 bits", _is_integer, lambda v: -(2**31) <= v < 2**31)
DEADLINE = Rule("deadline", "a finite number of seconds since 1970", _is_number, math.isfinite)


def prompt_form(request: "TextRequest") -> str:
    """The name of the one form in which the prompt is given. Raises InvalidRequest when it is none, or several."""
    given = [form for form in PROMPT_FORMS if getattr(request, form) is not None]
    if not given:
        raise _invalid(
            "prompt", "is missing: give one of `prompt`, `prompt_token_ids`, `messages`", "missing_field"
        )
    if len(given) > 1:
        forms = " and ".join(f"`{form}`" for form in given)
        raise InvalidRequest(f"{forms} are both given: give only one", param=given[1], code="invalid_value")
    return given[0]


def validate(request: "TextRequest", limits: Limits) -> None:
    """Check everything that needs no tokenizer. Raises InvalidRequest for the first thing that is wrong."""
    if not isinstance(request.id, str) or not request.id:
        raise _invalid("id", "must be a string that is not empty", "invalid_type")
    for rule in REQUEST_RULES:
        if (value := getattr(request, rule.param)) is not None:
            rule.check(value)
    _check_prompt(request, limits)
    _check_sampling(request.sampling, limits)
    _check_texts("stop", request.stop, MAX_STOPS)
    _check_texts("bad_words", request.bad_words, MAX_BAD_WORDS)
    _check_echo(request)
    _check_looks(request, limits)
    if request.grammar is not None and request.chat.shown_tools:
        raise _invalid("tools", f"must be left out beside {request.grammar.param}, or tool_choice be none")
    check_grammar(request)
    PRIORITY.check(request.priority)
    if request.deadline is not None:
        DEADLINE.check(request.deadline)
    if not isinstance(request.salt, str):
        raise _invalid("salt", "must be a string", "invalid_type")


def check_prompt(ids: Sequence[int], form: str, answer: int, limits: Limits) -> None:
    """Whether the model knows the prompt's ids, and room is left for an answer of so many tokens.

    Raises InvalidRequest.
    """
    if not ids:
        raise _invalid(form, "must not be empty: it has no tokens")
    if max(ids) >= limits.vocab_size:
        raise _invalid(
            form, f"has token {max(ids):,}, but the model's vocabulary ends at {limits.vocab_size - 1:,}"
        )
    if len(ids) + answer > limits.max_context:
        needed = f" and its answer needs at least {answer:,}" if answer else ""
        raise InvalidRequest(
            f"the prompt has {len(ids):,} tokens{needed}, but the context holds {limits.max_context:,} tokens",
            param=form,
            code="context_length_exceeded",
        )


def check_text(text: str, form: str, limits: Limits, *, truncated: bool = False) -> None:
    """Whether a text can be tokenised, and is short enough to be worth it. Raises InvalidRequest."""
    if not is_unicode(text):
        raise _invalid(form, "holds half a surrogate pair, which is no character", "invalid_text")
    at_least = len(text) // limits.longest_piece
    if at_least > limits.max_context and not truncated:
        raise InvalidRequest(
            f"the prompt has {len(text):,} characters, so at least {at_least:,} tokens, "
            f"but the context holds {limits.max_context:,} tokens",
            param=form,
            code="context_length_exceeded",
        )


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: false when it holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_prompt(request: "TextRequest", limits: Limits) -> None:
    form = prompt_form(request)
    value = getattr(request, form)
    if form == "prompt":
        if not isinstance(value, str):
            raise _invalid(form, f"must be a string, not {_shown(value)}", "invalid_type")
    elif isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _invalid(form, f"must be a list, not {_shown(value)}", "invalid_type")
    if len(value) == 0:
        raise _invalid(form, "must not be empty")
    if form == "prompt":
        check_text(value, form, limits, truncated=request.truncate_prompt_tokens is not None)
    elif form == "prompt_token_ids":
        _check_token_ids(form, value, limits.vocab_size)
    elif form == "inputs":
        _check_texts_or_ids(
            form, value, MAX_INPUTS, limits, truncated=request.truncate_prompt_tokens is not None
        )
    elif not all(isinstance(message, Mapping) for message in value):
        raise _invalid(form, "must be a list of objects", "invalid_type")


def _check_token_ids(param: str, ids: Sequence[Any], vocab_size: int) -> None:
    if not ids or (all(type(token) is int for token in ids) and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for place, token in enumerate(ids):
        if not _is_integer(token):
            raise _invalid(
                f"{param}[{place}]", f"must be a whole number, not {_shown(token)}", "invalid_type"
            )
        if not 0 <= token < vocab_size:
            allowed = f"a token id from 0 to {vocab_size - 1:,}"
            raise _invalid(f"{param}[{place}]", f"must be {allowed}, not {_shown(token)}")


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    for rule in SAMPLING_RULES:
        value = getattr(sampling, rule.param)
        if value is not None:
            rule.check(value)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise _invalid(
            "min_tokens",
            f"must not be above max_tokens ({sampling.max_tokens:,}), but is {sampling.min_tokens:,}",
        )
    _check_list("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    if sampling.allowed_token_ids is not None:
        _check_list("allowed_token_ids", sampling.allowed_token_ids, MAX_LISTED)
        _check_token_ids("allowed_token_ids", sampling.allowed_token_ids, limits.vocab_size)
        if not sampling.allowed_token_ids:
            raise _invalid("allowed_token_ids", "must not be empty: no token would be left")
    _check_list("banned_token_ids", sampling.banned_token_ids, MAX_LISTED)
    _check_token_ids("banned_token_ids", sampling.banned_token_ids, limits.vocab_size)
    _check_list("logit_bias", sampling.logit_bias, MAX_LISTED)
    for token, bias in sampling.logit_bias:
        if not _is_integer(token) or not 0 <= token < limits.vocab_size:
            known = f"ids go from 0 to {limits.vocab_size - 1:,}"
            raise _invalid(f"logit_bias.{token}", f"is of no token of the model: {known}")
        BIAS.check(bias)


def _check_echo(request: "TextRequest") -> None:
    if request.echo and request.messages is not None:
        raise _invalid("echo", "does not go with messages: there is no prompt to repeat")


def _check_looks(request: "TextRequest", limits: Limits) -> None:
    """A request that looks at its prompt asks for one thing, and has no answer to speak of."""
    if request.inputs is not None and request.pooling is None:
        raise _invalid("inputs", "must stand beside pooling: every other request has one prompt")
    if not request.looks:
        return
    field = "pooling" if request.pooling is not None else "continuations"
    for param, given in (
        ("continuations", request.pooling is not None and request.continuations is not None),
        ("n", request.n != 1),
        ("stop", bool(request.stop)),
        ("echo", request.echo),
        ("prompt_logprobs", request.prompt_logprobs is not None),
    ):
        if given:
            raise _invalid(param, f"does not go with {field}")
    if request.continuations is not None:
        _check_texts_or_ids("continuations", request.continuations, MAX_CONTINUATIONS, limits)


def _check_texts_or_ids(name: str, items: Any, most: int, limits: Limits, *, truncated: bool = False) -> None:
    _check_list(name, items, most)
    if not items:
        raise _invalid(name, "must not be empty")
    for place, item in enumerate(items):
        param = f"{name}[{place}]"
        if isinstance(item, str):
            if not item:
                raise _invalid(param, "must not be empty")
            check_text(item, param, limits, truncated=truncated)
        elif isinstance(item, (list, tuple)):
            _check_token_ids(param, item, limits.vocab_size)
        else:
            raise _invalid(
                param, f"must be a string or a list of token ids, not {_shown(item)}", "invalid_type"
            )


def check_grammar(request: "TextRequest") -> None:
    """Whether the request's grammar, if it has one, is of a size to be compiled, and other options go with it.

    Raises InvalidRequest.
    """
    grammar = request.grammar
    if grammar is None:
        return
    if len(grammar.source) > MAX_GRAMMAR_CHARS:
        size = f"must have at most {MAX_GRAMMAR_CHARS:,} characters, but has {len(grammar.source):,}"
        raise _invalid(grammar.param, size)
    if not is_unicode(grammar.source):
        raise _invalid(grammar.param, "holds half a surrogate pair, which is no character", "invalid_text")
    for name, given in (
        ("bad_words", request.bad_words),
        ("allowed_token_ids", request.sampling.allowed_token_ids),
        ("banned_token_ids", request.sampling.banned_token_ids),
    ):
        if given:
            raise _invalid(name, f"does not go with {grammar.param}, which says what may come")
    if request.stop and request.chat.shown_tools and not request.chat.must_call:
        raise _invalid("stop", "does not go with strict functions, whose grammar says where the answer ends")


def _check_texts(name: str, texts: Any, most: int) -> None:
    _check_list(name, texts, most)
    for place, text in enumerate(texts):
        param = f"{name}[{place}]"
        if not isinstance(text, str):
            raise _invalid(param, f"must be a string, not {_shown(text)}", "invalid_type")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _invalid(param, f"must have 1 to {MAX_STOP_CHARS:,} characters, but has {len(text):,}")
        if not is_unicode(text):
            raise _invalid(param, "holds half a surrogate pair, which is no character", "invalid_text")


def _check_list(param: str, value: Any, most: int) -> None:
    if not isinstance(value, (list, tuple)):
        raise _invalid(param, f"must be a list, not {_shown(value)}", "invalid_type")
    if len(value) > most:
        raise _invalid(param, f"must have at most {most} entries, but has {len(value):,}")


def _invalid(param: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"{param} {problem}", param=param, code=code)


def _shown(value: Any) -> str:
    """A value for a message, short however large it is."""
    match value:
        case None | bool():
            return "null" if value is None else str(value).lower()
        case int() if abs(value) >= 2**64:
            return "a number beyond 64 bits"
        case int() | float():
            return str(value)
        case str():
            return repr(value) if len(value) <= 40 else f"a string of {len(value):,} characters"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
    return type(value).__name__
