"""The grammar of an answer that must call tools, in Lark's notation as llguidance has it.

A thought may stand before the calls where the model thinks. Arguments fit their function's JSON Schema; each schema is
a document of its own, so that its references (``#/$defs/...``) lead where its author meant.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As ``json.dumps`` writes: one form for every value, so that no model can lose itself in white space."""


@dataclass(frozen=True, slots=True)
class Words:
    """What a form writes around calls and around arguments; ``{name}`` stands for the function's name.

    begin, end: around all calls. between: between two. before, after: around the arguments of each.
    """

    before: str
    after: str
    between: str = "\n"
    begin: str = ""
    end: str = ""


def grammar(
    words: Words,
    tools: Sequence[Mapping[str, Any]],
    term: Callable[[str], str],
    *,
    several: bool,
    thought: str = "",
) -> str:
    """An answer of one call or, if ``several``, more.

    tools: the functions that may be called, as OpenAI has them. term: from a text to terms of the grammar, so that the
    form's markers are the tokens that the model knows. thought: a rule for what may stand before the calls.
    """
    functions = [tool["function"] for tool in tools]
    rules = [
        " ".join(
            filter(
                None, ("start:", "thought?" if thought else "", term(words.begin), "calls", term(words.end))
            )
        ),
        f"calls: call ({term(words.between)} call)*" if several else "calls: call",
        "call: " + " | ".join(f"call_{n}" for n in range(len(functions))),
    ]
    for n, function in enumerate(functions):
        before, after = (
            term(text.replace("{name}", function["name"])) for text in (words.before, words.after)
        )
        rules.append(f"call_{n}: {before} arguments_{n} {after}")
        rules.append(f"arguments_{n}: %json {_schema(function)}")
    return "\n".join([*rules, thought])


def thought_rules(term: Callable[[str], str], begin: str, end: str, *, opened: bool) -> str:
    """A rule ``thought``: from ``begin``, which the prompt may have ``opened``, to ``end`` and the line ends behind."""
    opening = "" if opened else term(begin)
    if (closing := term(end)).startswith(
        "<"
    ):  # a special token is no text, so the text ends before it by itself
        return f'thought: {opening} IDEAS {closing} "\\n"*\nIDEAS: /(.|\\n)*/'
    return f'thought: {opening} ideas "\\n"*\nideas[suffix={closing}]: /(.|\\n)*/'


def literal(text: str) -> str:
    """A text as a term, none for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(function: Mapping[str, Any]) -> str:
    schema = {"type": "object", **(function.get("parameters") or {})}
    return json.dumps(
        schema | {"x-guidance": JSON_FORM | {"lenient": not function.get("strict")}}, ensure_ascii=False
    )
