"""Tool calls in the forms of three families: what is one is read, what is none stays as it was written."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.tool_forms import FORMS, Call, form_of

OFFERED = ("weather", "clock")
names = pytest.mark.parametrize("name", FORMS)


def write(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this family writes them."""
    match form:
        case "hermes":
            return "\n".join(
                f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"
                for name, given in calls
            )
        case "llama3":
            return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)
        case _:
            return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": given} for name, given in calls])


def read(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    said, calls = FORMS[form].read(text, OFFERED)
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


json_objects = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=8)
        | st.sampled_from(["</tool_call>", "[ARGS]", ";"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@names
@given(calls=st.lists(st.tuples(st.sampled_from(OFFERED), json_objects), min_size=1, max_size=4))
def test_what_is_written_is_read(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read(name, write(name, calls)) == ("", calls)


PIECES = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "weather", ";", " ", "\n",
          '{"name": "weather", "arguments": {"a": 1}}', '{"name": "weather", "parameters": {}}', "{", "}", "[", "]", '"')  # fmt: skip


@names
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12))
def test_a_text_without_calls_comes_back_as_it_was(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    said, calls = FORMS[name].read(text, OFFERED)
    assert calls or said == text
    assert FORMS[name].read(text, ()) == (text, [])


@names
def test_a_function_that_was_not_offered_is_not_called(name: str) -> None:
    text = write(name, [("rm", {"path": "/"})])
    assert read(name, text) == (text, [])


@names
@pytest.mark.parametrize("cut", [5, 20, -3])
def test_a_call_that_was_cut_short_stays_text(name: str, cut: int) -> None:
    text = write(name, [("weather", {"city": "Oslo", "days": [1, 2, 3]})]).removesuffix("\n</tool_call>")[
        :cut
    ]
    assert read(name, text) == (text, [])


@names
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1" + "0" * 5000, "[" * 100_000])
def test_what_is_no_json_for_others_is_no_call(name: str, value: str) -> None:
    text = write(name, [("weather", {"x": "VALUE"})]).replace('"VALUE"', value)
    assert read(name, text) == (text, [])


@names
def test_arguments_of_any_depth_are_calls_or_text(name: str) -> None:
    deepest = sys.getrecursionlimit()
    for depth in range(deepest - 200, deepest):
        text = write(name, [("weather", {"x": "VALUE"})]).replace('"VALUE"', "[" * depth + "]" * depth)
        said, calls = FORMS[name].read(text, OFFERED)
        assert calls or said == text


def test_words_around_hermes_calls_are_kept() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\nDone.'
    assert read("hermes", text) == ("Let me see.\n\nDone.", [("clock", {})])


def test_a_bad_call_among_hermes_calls_stays_text() -> None:
    good, bad = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>', "<tool_call>{oops}</tool_call>"
    assert read("hermes", good + bad + good) == (bad, [("clock", {}), ("clock", {})])


def test_a_hermes_call_that_ends_the_answer_needs_no_closing_tag() -> None:
    assert read("hermes", '<tool_call>\n{"name": "clock", "arguments": {}}\n') == ("", [("clock", {})])


def test_arguments_may_be_the_json_of_json() -> None:
    text = '<tool_call>{"name": "clock", "arguments": "{\\"zone\\": \\"CET\\"}"}</tool_call>'
    assert read("hermes", text) == ("", [("clock", {"zone": "CET"})])


def test_llama_marks_calls_by_a_special_token_or_not_at_all() -> None:
    call = '{"name": "clock", "parameters": {"zone": "CET"}}'
    assert read("llama3", "<|python_tag|>" + call) == ("", [("clock", {"zone": "CET"})])
    assert read("llama3", f"Sure: {call}") == (f"Sure: {call}", [])
    assert read("llama3", f"{call} and more") == (f"{call} and more", [])


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "clock", "arguments": {"zone": "CET"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]clock[ARGS]{"zone": "CET"}',
        '[TOOL_CALLS]clock{"zone": "CET"}',
        '[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{"zone": "CET"}',
    ],
)
def test_mistrals_older_and_newer_forms_are_read(text: str) -> None:
    assert read("mistral", text) == ("", [("clock", {"zone": "CET"})])
    assert read("mistral", f"I look.{text}{text}") == ("I look.", [("clock", {"zone": "CET"})] * 2)


def test_characters_are_written_as_themselves() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Malmö 🙂"}}</tool_call>'
    assert FORMS["hermes"].read(text, OFFERED)[1] == [Call("weather", '{"city": "Malmö 🙂"}')]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ 'return calls within <tool_call></tool_call> tags' }}", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('{{ \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}\' }}', "llama3"),
        ("{{ '<tool_call>\n<function=name>' }}", None),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_the_form_is_what_the_template_says(template: str, form: str | None) -> None:
    assert form_of(template) is (FORMS[form] if form else None)
