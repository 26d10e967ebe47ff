"""The forms in which models write tool calls, and how each is read.

A form knows the words that mark its calls and turns an answer's text into what the model said besides and the calls it
made. Whatever is no whole call of a function that was offered stays in the text as the model wrote it, so that
nothing is lost.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.tool_grammar import Words


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function. arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolForm(Protocol):
    """How a family of models writes tool calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The words that begin or end a call.

        Some models have them as special tokens, which are then shown to ``read`` though answers leave those out.
        """

    def writes(self, template: str) -> bool:
        """Whether a model with this chat template uses the form."""

    def words(self, template: str) -> Words:
        """How calls are written by a model with this chat template."""

    def read(self, text: str, offered: Collection[str]) -> tuple[str, list[Call]]:
        """The text without its calls of ``offered`` functions, and those calls in their order."""


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    markers = ("<tool_call>", "</tool_call>")

    def writes(self, template: str) -> bool:
        """Whether a model with this chat template uses the form (Qwen3-Coder's tags hold XML, which is another)."""
        return self.markers[0] in template and "<function=" not in template

    def words(self, template: str) -> Words:
        """How calls are written."""
        return Words('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", marker="<tool_call>")

    def read(self, text: str, offered: Collection[str]) -> tuple[str, list[Call]]:
        """The text without its calls, and the calls. The last closing tag may be missing: the answer ended there."""
        begin, end = self.markers
        said: list[str] = []
        calls: list[Call] = []
        at = 0
        while (start := text.find(begin, at)) >= 0:
            value, after = _json_at(text, start + len(begin))
            call = _call(value, "arguments", offered)
            closing = _skip_space(text, after)
            if call and (text.startswith(end, closing) or closing == len(text)):
                said.append(text[at:start])
                calls.append(call)
                at = min(closing + len(end), len(text))
            else:
                said.append(text[at : start + len(begin)])
                at = start + len(begin)
        said.append(text[at:])
        return _said(text, said, calls)


class Llama3:
    """``{"name": ..., "parameters": {...}}``, several separated by ``;``, as the whole answer: Llama 3.1 to 3.3."""

    markers = ("<|python_tag|>",)

    def writes(self, template: str) -> bool:
        """Whether a model with this chat template uses the form."""
        return '{"name": function name, "parameters": dictionary' in template

    def words(self, template: str) -> Words:
        """How calls are written."""
        return Words('{"name": "{name}", "parameters": ', "}", between="; ")

    def read(self, text: str, offered: Collection[str]) -> tuple[str, list[Call]]:
        """No text and the calls, or the whole text: the form marks no calls amid other words."""
        calls: list[Call] = []
        at = _skip_space(text, 0)
        at = _skip_space(text, at + len(self.markers[0]) if text.startswith(self.markers[0], at) else at)
        while at < len(text):
            value, at = _json_at(text, at)
            call = _call(value, "parameters", offered) or _call(value, "arguments", offered)
            if not call:
                return text, []
            calls.append(call)
            at = _skip_space(text, at)
            if text.startswith(";", at):
                at = _skip_space(text, at + 1)
        return ("", calls) if calls else (text, [])


class Mistral:
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` from 2025 on."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    _head = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?=\s*\{)")

    def writes(self, template: str) -> bool:
        """Whether a model with this chat template uses the form."""
        return self.markers[0] in template

    def words(self, template: str) -> Words:
        """How calls are written: in the newer form if the template writes it."""
        if "[ARGS]" in template:
            return Words("[TOOL_CALLS]{name}[ARGS]", "", marker="[TOOL_CALLS]", between="")
        call = '{"name": "{name}", "arguments": '
        return Words(call, "}", marker="[TOOL_CALLS]", between=", ", begin="[TOOL_CALLS][", end="]")

    def read(self, text: str, offered: Collection[str]) -> tuple[str, list[Call]]:
        """The text without its calls, and the calls."""
        first, *parts = text.split(self.markers[0])
        said, calls = [first], []
        for part in parts:
            found, rest = self._calls(part, offered)
            calls += found
            said.append(rest if found else self.markers[0] + part)
        return _said(text, said, calls)

    def _calls(self, part: str, offered: Collection[str]) -> tuple[list[Call], str]:
        """The calls behind one marker, none if any is wrong, and the text behind them."""
        if head := self._head.match(part):
            arguments, after = _json_at(part, head.end())
            values: Any = [{"name": head[1], "arguments": arguments}]
        else:
            values, after = _json_at(part, 0)
            values = values if isinstance(values, list) else [values]
        calls = [call for value in values if (call := _call(value, "arguments", offered))]
        return (calls, part[after:]) if len(calls) == len(values) else ([], part)


FORMS: dict[str, ToolForm] = {"hermes": Hermes(), "llama3": Llama3(), "mistral": Mistral()}


def form_of(template: str) -> ToolForm | None:
    """The form that a model with this chat template uses, if it is one of FORMS."""
    return next((form for form in FORMS.values() if form.writes(template)), None)


def _call(value: Any, arguments: str, offered: Collection[str]) -> Call | None:
    """The call that an object describes, its arguments under the given name; none when it is not one."""
    match value:
        case {"name": str(name), **rest} if name in offered:
            given = rest.get(arguments, {} if rest.keys() <= {"id"} else None)
            if isinstance(given, str):  # some models write the JSON of JSON
                inner, end = _json_at(given, 0)
                given = inner if end == len(given) else None
            if isinstance(given, dict) and (text := _as_text(given)):
                return Call(name, text)
    return None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at`` or behind the white space there, and where it ends; None if there is none."""
    start = _skip_space(text, at)
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _as_text(arguments: dict[str, Any]) -> str:
    """A call's arguments as JSON; empty for what is nested so deep that it could just be read."""
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        return ""


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _said(text: str, parts: list[str], calls: list[Call]) -> tuple[str, list[Call]]:
    """What is left of the text. White space around calls says nothing."""
    return ("".join(parts).strip() if calls else text), calls
