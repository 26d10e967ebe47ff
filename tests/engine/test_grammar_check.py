"""Which schemas are refused, and which of these ``strict: false`` lets through: the lists in docs/structured-output.md."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.engine.grammar import Grammar
from headrace.engine.grammar_check import GrammarChecker
from headrace.engine.guidance import BadGrammar

NOT_ENFORCED: list[dict[str, Any]] = [
    *({word: {}} for word in ("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems")),
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {}}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "uniqueItems": True},
    {"$dynamicAnchor": "a"},
    {"anyOf": [{"type": "array", "items": {"not": {"type": "null"}}}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "string", "format": "iri"},
]
NEVER_TAKEN: list[dict[str, Any]] = [
    {"patternProperties": {"^a": {"type": "integer"}, "^ab": {"type": "string"}}},
    {"$ref": "https://example.com/schema"},
    {"type": "string", "maxLength": 2.0},
    {"type": "number", "multipleOf": 0.123456789012},
]


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    with closing(GrammarChecker(20.0)) as made:
        yield made


@pytest.mark.parametrize("schema", NOT_ENFORCED, ids=str)
def test_what_cannot_be_enforced_is_refused_with_the_remedy_and_passed_over_where_that_is_asked(
    checker: GrammarChecker, schema: dict[str, Any]
) -> None:
    with pytest.raises(BadGrammar, match="json_schema has strict: false") as refused:
        checker.check(Grammar.json_schema(schema))
    assert "Enable" not in str(refused.value)
    assert checker.check(Grammar.json_schema(schema, lenient=True)) > 0


@pytest.mark.parametrize("schema", NEVER_TAKEN, ids=str)
def test_no_remedy_is_named_where_there_is_none(checker: GrammarChecker, schema: dict[str, Any]) -> None:
    for lenient in (False, True):
        with pytest.raises(BadGrammar) as refused:
            checker.check(Grammar.json_schema(schema, lenient=lenient))
        assert "strict" not in str(refused.value)


def test_a_child_that_others_ended_is_made_again(checker: GrammarChecker) -> None:
    form = Grammar.choice(["yes"])
    checker.check(form)
    child = checker._child
    assert child is not None
    child.kill()
    child.wait()
    checker.check(form)


def test_a_child_lives_on_where_a_supervisor_tells_all_to_end(checker: GrammarChecker) -> None:
    form = Grammar.choice(["yes"])
    checker.check(form)
    child = checker._child
    assert child is not None
    child.terminate()
    checker.check(form)
    assert checker._child is child


def test_a_child_that_does_not_start_says_nothing_of_the_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.close()
    with monkeypatch.context() as here:
        here.setattr("sys.executable", "false")
        with pytest.raises(ChildProcessError, match="did not start"):
            checker.check(Grammar.choice(["yes"]))
    checker.check(Grammar.choice(["yes"]))
