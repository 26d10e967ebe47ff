"""What form an answer must have: a JSON schema, a regular expression, a choice, or a grammar in Lark's notation.

The description alone, which travels with a request; ``engine/grammars.py`` makes it ready to use. No llguidance here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

MAX_GRAMMAR_CHARS = 128 * 1024
"""Of a schema written as JSON, an expression, a grammar, or all choices together."""

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As ``json.dumps`` writes: one form for every value, so that no model can lose itself in white space."""


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer. The whole answer must have it, from its first character to its last.

    before: rules in Lark's notation, one of them ``before``, of what stands before the answer (a thought); empty for nothing.
    thoughts: tokens that get a model to the answer which may think before it: the end of a thought, and a whole one.
    lenient: pass over keywords of a JSON schema that cannot be enforced, instead of refusing it. param: the field that
    errors name.
    """

    kind: GrammarKind
    source: str
    lenient: bool = False
    param: str = "grammar"
    before: str = ""
    thoughts: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, lenient: bool = False) -> "Grammar":
        """JSON that fits a schema, written as ``json.dumps`` writes it. Properties come in the schema's order."""
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), lenient)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A text that matches from end to end. Syntax: that of Rust's regex crate, without anchors."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of these texts."""
        return cls(GrammarKind.LARK, "start: " + " | ".join(json.dumps(text) for text in choices))

    @classmethod
    def lark(cls, source: str) -> "Grammar":
        """A context-free grammar in the notation of Lark, as llguidance has it; its rule ``start`` is the answer."""
        return cls(GrammarKind.LARK, source)

    def named(self, param: str) -> "Grammar":
        """The same, with errors that name this field."""
        return replace(self, param=param)
