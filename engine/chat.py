"""Chats: what a request may say of its template and tools, and what an answer's text holds besides the answer."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from headrace.engine.detokenizer import detokenize
from headrace.engine.errors import EngineError, InvalidRequest
from headrace.engine.grammar import Grammar
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.tool_forms import FORMS, Call, form_of
from headrace.engine.tool_grammar import Thought, calls_grammar, literal, text_or_calls_grammar

THINK, END_OF_THINK = "<think>", "</think>"
_TAIL_TOKENS = 8
"""Enough to hold ``<think>`` and line ends, also where the tag is no token of its own."""


class ToolChoice(StrEnum):
    """Whether the model may call tools, and whether it must."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages are put to the model, and what it may answer.

    tools: functions as OpenAI has them, ``{"type": "function", "function": {"name", "description", "parameters"}}``; with
    ``ToolChoice.NONE`` they are not shown. only_tool: the one that may be called. parallel_tool_calls: whether more than
    the first call counts. add_generation_prompt: whether the template opens the answer (None: unless the final message
    is continued). template_kwargs: further values for the template.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    only_tool: str | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown_tools(self) -> list[Mapping[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice is ToolChoice.NONE else list(self.tools)

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice is ToolChoice.REQUIRED

    @property
    def offered(self) -> tuple[str, ...]:
        """Names of the functions that may be called."""
        names = (str(tool["function"]["name"]) for tool in self.shown_tools)
        return tuple(name for name in names if self.only_tool in (None, name))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer makes. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """An answer's text, taken apart. reasoning: None where the model did not think."""

    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ChatFormat:
    """What a model's chat template tells of its answers: the form of its tool calls, and whether it thinks.

    tool_form: a name in FORMS, or ``auto``. Raises EngineError for another.
    """

    def __init__(self, tokenizer: Tokenizer, tool_form: str = "auto") -> None:
        if tool_form not in ("auto", *FORMS):
            raise EngineError(f"tool_form must be auto or one of {', '.join(FORMS)}, not {tool_form!r}")
        self._tokenizer = tokenizer
        self._template = template = tokenizer.chat_template(tools=True)
        self._takes_tools = "tools" in template
        self._form = form_of(template) if tool_form == "auto" else FORMS[tool_form]
        self._thinks = END_OF_THINK in template
        self._reasoning_ids = tokenizer.ids_of((THINK, END_OF_THINK)) if self._thinks else {}
        self._thoughts = tuple(map(tuple, tokenizer.encode_rendered([END_OF_THINK, THINK + END_OF_THINK])))
        self._tool_ids = tokenizer.ids_of(self._form.markers) if self._form else {}

    def check(self, options: ChatOptions) -> None:
        """Whether the model can do what is asked. Raises InvalidRequest."""
        if not options.shown_tools:
            return
        if not self._takes_tools:
            message = "tools cannot be used with this model: its chat template does not show them to it"
            raise InvalidRequest(message, param="tools", code="unsupported_option")
        if self._form is None:
            message = (
                f"tools cannot be used with this model: its form of tool calls is none of {', '.join(FORMS)}"
            )
            raise InvalidRequest(message, param="tools", code="unsupported_option")

    def shown_ids(self, options: ChatOptions) -> frozenset[int]:
        """Special tokens that must be shown in an answer's text, so that ``read`` finds what they mark."""
        ids = self._reasoning_ids | (self._tool_ids if options.shown_tools else {})
        return self._tokenizer.special_ids.intersection(ids.values())

    def thinking(
        self, prompt: Sequence[int], messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> bool:
        """Whether the prompt leaves the model thinking: the template opened a thought, or the message to go on with."""
        if not self._thinks:
            return False
        if options.continue_final_message:
            content = str(messages[-1].get("content"))
            return content.rfind(THINK) > content.rfind(END_OF_THINK)
        tail = detokenize(self._tokenizer, prompt[-_TAIL_TOKENS:], skip_special=False)
        return tail.rstrip().endswith(THINK)

    def grammar(self, options: ChatOptions, given: Grammar | None, *, thinking: bool) -> Grammar | None:
        """What an answer must be; None where anything goes.

        That is a call where it must call a tool, and calls as their schemas say where it may call one that is ``strict``;
        else what is ``given``, behind a thought if the model thinks.
        """
        thought = Thought(THINK, END_OF_THINK, opened=thinking) if self._thinks else None
        if (calls := self._calls(options, thought)) is not None:
            return replace(Grammar.lark(calls).named("tools"), thoughts=self._thoughts if thought else ())
        if given is None or thought is None:
            return given
        return replace(given, before=thought.rules(self._term), thoughts=self._thoughts)

    def _calls(self, options: ChatOptions, thought: Thought | None) -> str | None:
        tools = [tool for tool in options.shown_tools if tool["function"]["name"] in options.offered]
        strict = any(tool["function"].get("strict") for tool in tools)
        if self._form is None or not tools or not (options.must_call or strict):
            return None
        write = calls_grammar if options.must_call else text_or_calls_grammar
        several = options.parallel_tool_calls and options.only_tool is None
        return write(self._form.words(self._template), tools, self._term, several=several, thought=thought)

    def _term(self, text: str) -> str:
        """A text as terms of a grammar: tokens among its words by their ids, since llguidance takes them for no text."""
        ids = self._reasoning_ids | self._tool_ids
        if not ids:
            return literal(text)
        parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else literal(part) for part in parts if part)

    def read(self, text: str, options: ChatOptions, *, thinking: bool, seed: str) -> Said:
        """Take an answer's text apart. seed: makes the calls' ids, so that a replay gives the same."""
        reasoning, text = self._split(text, thinking) if self._thinks else (None, text)
        if not options.shown_tools or self._form is None:
            return Said(text, reasoning)
        text, calls = self._form.read(text, options.offered)
        if not options.parallel_tool_calls:
            calls = calls[:1]
        return Said(text, reasoning, tuple(_named(call, n, seed) for n, call in enumerate(calls)))

    def _split(self, text: str, thinking: bool) -> tuple[str | None, str]:
        """Thought and answer. An answer that ended while the model thought is all thought."""
        start = text.lstrip()
        if not thinking and not start.startswith(THINK):
            return None, text
        thought, _, answer = (text if thinking else start.removeprefix(THINK)).partition(END_OF_THINK)
        return thought.strip("\n"), answer.lstrip("\n")


def _named(call: Call, index: int, seed: str) -> ToolCall:
    """The call with an id: nine letters and digits, since Mistral's templates take no others."""
    digest = hashlib.blake2b(f"{seed}#{index}".encode(), digest_size=8).hexdigest()
    return ToolCall(digest[:9], call.name, call.arguments)
