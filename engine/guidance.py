"""llguidance's side of a grammar: the one place that says with which options and limits it is compiled.

Imported by the engine's process and by the one that checks grammars (``engine/grammar_check.py``); knows no torch.
"""

import json

import llguidance

from headrace.engine.grammar import JSON_FORM, Grammar, GrammarKind
from headrace.engine.panics import LibraryPanic, panics_as_errors

MAX_MESSAGE_CHARS = 300
_NOTHING_FITS = "NoExtensionBias"  # llguidance's word for a mask without tokens
# How its message begins where lenience helps.
_NOT_ENFORCED = ("Unimplemented keys", "Unknown format", "oneOf")
_LENIENCE = "; response_format passes over what cannot be enforced where its json_schema has strict: false"


class BadGrammar(Exception):
    """The grammar cannot be compiled; the message says why."""


def compile_matcher(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher at the beginning of an answer, which has computed its first mask. Raises BadGrammar."""
    try:
        with panics_as_errors:
            return _matcher(tokenizer, grammar)
    except LibraryPanic as panic:
        raise BadGrammar("llguidance fails on it, by a defect of its own") from panic


def _matcher(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    try:
        source = _source(grammar)
    except ValueError as error:
        raise BadGrammar(_told(str(error), grammar)) from error
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        message = matcher.get_error()
        raise BadGrammar(
            "no answer can have this form" if _NOTHING_FITS in message else _told(message, grammar)
        )
    if matcher.is_stopped():
        raise BadGrammar("it allows no answer but an empty one")
    return matcher


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    source = _answer(grammar)
    if not grammar.before:
        return source
    is_lark = grammar.kind is GrammarKind.LARK
    answer = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
    whole = {"lark_grammar": f"start: before @answer\n{grammar.before}"}
    return json.dumps({"grammars": [whole, answer | {"name": "answer"}]})


def _answer(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            options = JSON_FORM | {"lenient": grammar.lenient}
            return str(llguidance.LLMatcher.grammar_from_json_schema(grammar.source, overrides=options))
        case GrammarKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(grammar.source))
        case GrammarKind.LARK:
            return str(llguidance.LLMatcher.grammar_from_lark(grammar.source))


def _told(message: str, grammar: Grammar) -> str:
    """llguidance's message in a line, with the remedy where there is one."""
    line = " ".join(message.split("<state>")[0].split())
    line = line.split(". Enable '")[0]  # options of llguidance's, which nobody here can set
    short = line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + "..."
    remedy = grammar.kind is GrammarKind.JSON_SCHEMA and line.startswith(_NOT_ENFORCED)
    return short + _LENIENCE if remedy else short
