"""Grammars of answers that must call tools, as llguidance reads them."""

import dataclasses
from contextlib import closing
from typing import Any

import llguidance
import llguidance.hf
import pytest
from small_tokenizers import small_chat

from headrace.engine.chat import ChatFormat, ChatOptions, ToolChoice
from headrace.engine.closing import Closing
from headrace.engine.grammar import Grammar
from headrace.engine.grammar_check import GrammarChecker
from headrace.engine.guidance import BadGrammar, compile_matcher
from headrace.engine.guide import BETWEEN_STEPS
from headrace.engine.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]
TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3": '{{ tools }}{"name": function name, "parameters": dictionary',
    "mistral": "{{ tools }}[TOOL_CALLS]",
}
OSLO, ZONE = '{"city": "Oslo"}', '{"zone": "CET"}'
FORMS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": ' + OSLO + "}\n</tool_call>",
        '<tool_call>\n{"name": "clock", "arguments": ' + ZONE + "}\n</tool_call>",
        "{}\n{}",
    ),
    "llama3": (
        '{"name": "weather", "parameters": ' + OSLO + "}",
        '{"name": "clock", "parameters": ' + ZONE + "}",
        "{}; {}",
    ),
    "mistral": (
        '{"name": "weather", "arguments": ' + OSLO + "}",
        '{"name": "clock", "arguments": ' + ZONE + "}",
        "[TOOL_CALLS][{}, {}]",
    ),
}
FORM_MARKERS = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": (), "mistral": ("[TOOL_CALLS]",)}
forms = pytest.mark.parametrize("form", FORMS)


def required(**options: Any) -> ChatOptions:
    return ChatOptions(**{"tools": TOOLS, "tool_choice": ToolChoice.REQUIRED, **options})


def takes(
    tokenizer: Tokenizer,
    text: str,
    options: ChatOptions,
    *,
    given: Grammar | None = None,
    thinking: bool = False,
) -> bool:
    """Whether the grammar for these options takes the text as a whole answer."""
    grammar = ChatFormat(tokenizer).grammar(options, given, thinking=thinking)
    assert grammar is not None
    matcher = compile_matcher(llguidance.hf.from_tokenizer(tokenizer._chat), grammar)
    ids = tokenizer.encode_rendered([text])[0]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(form: str) -> tuple[str, str]:
    """One call of weather, and one of each."""
    weather, clock, both = FORMS[form]
    alone = f"[TOOL_CALLS][{weather}]" if form == "mistral" else weather
    return alone, both.replace("{}", "%s") % (weather, clock)


@forms
@pytest.mark.parametrize("special", [None, False, True], ids=["as text", "as tokens", "as special tokens"])
def test_an_answer_is_one_call_or_more_that_the_form_itself_reads(form: str, special: bool | None) -> None:
    markers = FORM_MARKERS[form] if special is not None else ()
    tokenizer = small_chat(TEMPLATES[form], markers, special=bool(special))
    one, two = written(form)
    assert takes(tokenizer, one, required())
    assert takes(tokenizer, two, required())
    said = ChatFormat(tokenizer).read(two, required(), thinking=False, seed="x")
    assert [(call.name, call.arguments) for call in said.tool_calls] == [("weather", OSLO), ("clock", ZONE)]
    assert said.text == ""


@forms
def test_nothing_else_is_an_answer(form: str) -> None:
    tokenizer = small_chat(TEMPLATES[form])
    one, two = written(form)
    for wrong in (
        f"Sure. {one}",
        one[:-1],
        f"{one} ok",
        one.replace('"Oslo"', "5"),
        one.replace("weather", "rm"),
    ):
        assert not takes(tokenizer, wrong, required())
    assert not takes(tokenizer, two, required(parallel_tool_calls=False))
    assert takes(tokenizer, one, required(parallel_tool_calls=False))
    assert takes(tokenizer, one, required(only_tool="weather"))
    assert not takes(tokenizer, one, required(only_tool="clock"))


@pytest.mark.parametrize("special", [(), ("[TOOL_CALLS]", "[ARGS]")], ids=["as text", "as special tokens"])
@pytest.mark.parametrize("newer", [False, True])
def test_markers_are_those_of_the_template_and_tokens_where_the_model_has_them(
    newer: bool, special: tuple[str, ...]
) -> None:
    tokenizer = small_chat(TEMPLATES["mistral"] + "[ARGS]" * newer, special)
    call = f"[TOOL_CALLS]weather[ARGS]{OSLO}"
    assert takes(tokenizer, call, required()) is newer
    assert takes(tokenizer, call + call, required()) is newer
    assert takes(tokenizer, written("mistral")[0], required()) is not newer


@pytest.mark.parametrize("special", [None, False, True], ids=["as text", "as tokens", "as special tokens"])
def test_a_model_that_thinks_may_think_before_it_calls(special: bool | None) -> None:
    tags = ("<think>", "</think>") if special is not None else ()
    tokenizer = small_chat(TEMPLATES["hermes"] + "</think>", tags, special=bool(special))
    call = written("hermes")[0]
    assert takes(tokenizer, f"<think>\nLet me\nsee.\n</think>\n\n{call}", required())
    assert takes(tokenizer, call, required())
    assert takes(tokenizer, f"Let me\nsee.</think>\n\n{call}", required(), thinking=True)
    assert not takes(tokenizer, f"Let me see. {call}", required())
    assert not takes(tokenizer, call, required(), thinking=True), "it would be part of the thought"


STRICT = ChatOptions(tools=[TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]])  # type: ignore[operator]


@forms
@pytest.mark.parametrize("special", [None, False, True], ids=["as text", "as tokens", "as special tokens"])
def test_strict_functions_are_called_as_their_schemas_say_in_any_answer(
    form: str, special: bool | None
) -> None:
    markers = FORM_MARKERS[form] if special is not None else ()
    tokenizer = small_chat(TEMPLATES[form], markers, special=bool(special))
    one, two = written(form)
    for answer in ("It rains.", "", "a <tool of [TOOL", one, two):
        assert takes(tokenizer, answer, STRICT), answer
    assert not takes(tokenizer, one.replace('"Oslo"', "5"), STRICT)
    assert not takes(tokenizer, one.replace("weather", "rm"), STRICT)
    if form != "llama3":
        assert takes(tokenizer, f"I look. {one} Done.", STRICT)
        assert not takes(tokenizer, f"I look. {one[:-3]}", STRICT)
    alone = dataclasses.replace(STRICT, parallel_tool_calls=False)
    assert takes(tokenizer, one, alone)


@pytest.mark.parametrize("special", [None, False, True], ids=["as text", "as tokens", "as special tokens"])
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (Grammar.json_schema(CITY), OSLO),
        (Grammar.regex("[0-9]+ mm"), "12 mm"),
        (Grammar.choice(["wet", "dry"]), "wet"),
        (Grammar.lark('start: "rain" | "fog"'), "fog"),
    ],
)
def test_a_thought_may_stand_before_any_structured_answer(
    given: Grammar, answer: str, special: bool | None
) -> None:
    tags = ("<think>", "</think>") if special is not None else ()
    tokenizer = small_chat("{{ messages }}</think>", tags, special=bool(special))
    plain = ChatOptions()
    assert takes(tokenizer, answer, plain, given=given)
    assert takes(tokenizer, f"<think>\nHm.\n</think>\n\n{answer}", plain, given=given)
    assert takes(tokenizer, f"Hm.\n</think>\n\n{answer}", plain, given=given, thinking=True)
    assert not takes(tokenizer, answer, plain, given=given, thinking=True)
    assert not takes(tokenizer, f"<think>Hm.</think>{answer}!", plain, given=given)


@pytest.mark.parametrize("special", [None, False, True], ids=["as text", "as tokens", "as special tokens"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("options", "given"),
    [
        (ChatOptions(), Grammar.json_schema(CITY)),
        (ChatOptions(), Grammar.json_schema({"type": "array"})),
        (ChatOptions(), Grammar.regex("[0-9]+ mm")),
        (ChatOptions(), Grammar.choice(["wet", "dry"])),
        (required(), None),
        (required(only_tool="weather"), None),
        (dataclasses.replace(required(), parallel_tool_calls=False), None),
    ],
)
def test_out_of_a_thought_leads_a_way_to_a_whole_answer(
    options: ChatOptions, given: Grammar | None, thinking: bool, special: bool | None
) -> None:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>") if special is not None else ()
    tokenizer = small_chat(TEMPLATES["hermes"] + "</think>", tags, special=bool(special))
    grammar = ChatFormat(tokenizer).grammar(options, given, thinking=thinking)
    assert grammar is not None
    matcher = compile_matcher(llguidance.hf.from_tokenizer(tokenizer._chat), grammar)
    ways = Closing(tokenizer.pieces())
    at_once = ways.way(matcher, 200, thoughts=grammar.thoughts)
    assert at_once is not None
    assert 0 <= ways.fewest(matcher) <= len(at_once)
    assert matcher.consume_tokens(tokenizer.encode_rendered(["" if thinking else "<think>"])[0])
    assert matcher.consume_tokens(tokenizer.encode_rendered(['Is it {"city": "O'])[0])
    later = ways.way(matcher, 200, BETWEEN_STEPS, thoughts=grammar.thoughts)
    assert later is not None
    assert matcher.consume_tokens(later)
    assert matcher.is_accepting()


def test_a_grammar_that_names_tokens_can_be_checked_without_the_model() -> None:
    tokenizer = small_chat(TEMPLATES["mistral"] + "</think>", ("[TOOL_CALLS]", "<think>", "</think>"))
    chat_format, digits = ChatFormat(tokenizer), Grammar.regex("[0-9]+")
    with closing(GrammarChecker(10.0)) as checker:
        for options, given in ((required(), None), (STRICT, None), (ChatOptions(), digits)):
            grammar = chat_format.grammar(options, given, thinking=True)
            assert grammar is not None
            checker.check(grammar)
        broken = required(
            tools=[{"function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}]
        )
        wrong = chat_format.grammar(broken, None, thinking=False)
        assert wrong is not None
        with pytest.raises(BadGrammar):
            checker.check(wrong)


def test_a_function_whose_arguments_have_no_end_stands_in_nobody_s_way() -> None:
    needs_itself = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    endless = {"type": "function", "function": {"name": "deep", "parameters": needs_itself, "strict": True}}
    chat_format = ChatFormat(small_chat(TEMPLATES["hermes"]))
    with closing(GrammarChecker(10.0)) as checker:
        for options in (ChatOptions(tools=[*TOOLS, endless]), required(tools=[*TOOLS, endless])):
            grammar = chat_format.grammar(options, None, thinking=False)
            assert grammar is not None
            assert checker.check(grammar) == 0


def test_only_an_answer_that_must_call_has_a_grammar() -> None:
    chat_format = ChatFormat(small_chat(TEMPLATES["hermes"]))
    assert chat_format.grammar(ChatOptions(tools=TOOLS), None, thinking=False) is None
    assert chat_format.grammar(ChatOptions(), None, thinking=False) is None
    digits = Grammar.regex("[0-9]+")
    assert chat_format.grammar(ChatOptions(), digits, thinking=False) is digits, (
        "of a model that does not think"
    )
