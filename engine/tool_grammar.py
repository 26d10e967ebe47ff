"""Grammars of answers that call tools, in Lark's notation as llguidance has it.

A thought may stand before the calls where the model thinks. Arguments fit their function's JSON Schema; each schema is
a document of its own, so that its references (``#/$defs/...``) lead where its author meant.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.engine.grammar import JSON_FORM

Term = Callable[[str], str]
"""From a text to terms of a grammar: the words that are tokens of the model are named by their ids."""


@dataclass(frozen=True, slots=True)
class Words:
    """What a form writes around calls and around arguments; ``{name}`` stands for the function's name.

    marker: what tells calls from other text, at the beginning of ``begin`` or else of ``before``; empty where a call is
    the whole answer. begin, end: around all calls. between: between two. before, after: around the arguments of each.
    """

    before: str
    after: str
    marker: str = ""
    between: str = "\n"
    begin: str = ""
    end: str = ""

    def behind_the_marker(self) -> "Words":
        """The same without the marker."""
        if self.begin:
            return replace(self, begin=self.begin.removeprefix(self.marker))
        return replace(self, before=self.before.removeprefix(self.marker))


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought that stands before the calls. opened: the prompt has begun it, so that it must be ended."""

    begin: str
    end: str
    opened: bool

    def rules(self, term: Term) -> str:
        """Rules, one of them ``before``: the thought, and the line ends behind it."""
        before = f"before: thought{'' if self.opened else '?'}"
        opening = "" if self.opened else term(self.begin)
        if (closing := term(self.end)).startswith(
            "<"
        ):  # a token of its own is no text: the text ends before it
            return f'{before}\nthought: {opening} IDEAS {closing} "\\n"*\nIDEAS: /(.|\\n)*/'
        return f'{before}\nthought: {opening} ideas "\\n"*\nideas[suffix={closing}]: /(.|\\n)*/'


def calls_grammar(
    words: Words,
    tools: Sequence[Mapping[str, Any]],
    term: Term,
    *,
    several: bool,
    thought: Thought | None = None,
) -> str:
    """An answer of one call or, if ``several``, more. tools: the functions that may be called, as OpenAI has them."""
    return "\n".join(
        [_start("calls", thought), *_calls(words, tools, term, several), *_thought(thought, term)]
    )


def text_or_calls_grammar(
    words: Words,
    tools: Sequence[Mapping[str, Any]],
    term: Term,
    *,
    several: bool,
    thought: Thought | None = None,
) -> str:
    """Any answer, in which calls are what they should be. Where no word marks a call, other answers begin with no ``{``."""
    if not words.marker:
        text = ["answer: calls | OTHER?", "OTHER: /[^{](.|\\n)*/", *_calls(words, tools, term, several)]
    else:
        marker = term(words.marker)
        said = f"said: TEXT {marker}" if marker.startswith("<") else f"said[lazy]: TEXT {marker}"
        separate = several and not words.begin  # then each call has the marker, and text may stand between
        text = [
            f"answer: called{'*' if several else '?'} TEXT",
            "called: said calls",
            said,
            "TEXT: /(.|\\n)*/",
            *_calls(words.behind_the_marker(), tools, term, several and not separate),
        ]
    return "\n".join([_start("answer", thought), *text, *_thought(thought, term)])


def literal(text: str) -> str:
    """A text as a term, none for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _start(answer: str, thought: Thought | None) -> str:
    return f"start: {'before ' if thought else ''}{answer}"


def _thought(thought: Thought | None, term: Term) -> list[str]:
    return [] if thought is None else [thought.rules(term)]


def _calls(words: Words, tools: Sequence[Mapping[str, Any]], term: Term, several: bool) -> list[str]:
    """Rules: ``calls`` is one call or more, with what stands around them all."""
    functions = [tool["function"] for tool in tools]
    more = f"({term(words.between)} call)*" if several else ""
    rules = [
        f"calls: {term(words.begin)} call {more} {term(words.end)}",
        "call: " + " | ".join(f"call_{n}" for n in range(len(functions))),
    ]
    for n, function in enumerate(functions):
        before, after = (
            term(text.replace("{name}", function["name"])) for text in (words.before, words.after)
        )
        rules.append(f"call_{n}: {before} arguments_{n} {after}")
        rules.append(f"arguments_{n}: %json {_schema(function)}")
    return rules


def _schema(function: Mapping[str, Any]) -> str:
    schema = {"type": "object", **(function.get("parameters") or {})}
    return json.dumps(
        schema | {"x-guidance": JSON_FORM | {"lenient": not function.get("strict")}}, ensure_ascii=False
    )
