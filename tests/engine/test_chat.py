"""Chats with tools and with models that think, through a token engine that says what it is told."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from small_tokenizers import small_chat

from headrace.engine.chat import ChatFormat, ChatOptions, ToolChoice
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.grammar import Grammar
from headrace.engine.request import FinishReason, SamplingParams
from headrace.engine.text import LocalTextEngine, open_text_engine
from headrace.engine.text_engine import TextCompletion, TextRequest
from headrace.engine.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}
TOOLS = ChatOptions(tools=[WEATHER])
HELLO = [{"role": "user", "content": "water"}]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
MISTRAL_CALL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]'
TEMPLATE = (
    "{% for tool in tools or [] %}[tool]{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING = TEMPLATE + "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}{# </think> #}"


def answer(
    said: str,
    template: str = TEMPLATE,
    chat: ChatOptions = TOOLS,
    *,
    special: tuple[str, ...] = (),
    tool_form: str = "auto",
    **fields: Any,
) -> tuple[TextCompletion, str]:
    """How a model that says ``said`` ends the chat, and the prompt it was given."""
    tokenizer = small_chat(template, special)
    tokens = tokenizer.encode_rendered([said])[0]
    inner = ScriptedEngine(lambda request: tokens, len(tokenizer.pieces()))
    engine = LocalTextEngine(inner, tokenizer, tool_form=tool_form)
    engine.add_many([TextRequest("x", messages=fields.pop("messages", HELLO), chat=chat, **fields)])
    (done,) = engine.poll(10.0)
    prompt = (
        tokenizer._backend.decode(list(inner.seen[0].prompt), skip_special_tokens=False) if inner.seen else ""
    )
    return done, prompt


def calls(done: TextCompletion) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in done.choices[0].tool_calls]


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tools_are_shown_and_calls_are_read() -> None:
    done, prompt = answer(f"I look.\n{HERMES_CALL}")
    assert prompt == "[tool]weather[user]water[/][assistant]"
    assert calls(done) == [("weather", {"city": "Oslo"})]
    choice = done.choices[0]
    assert (choice.text, choice.finish_reason) == ("I look.", FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("special", [(), ("[TOOL_CALLS]",)], ids=["as text", "as a special token"])
def test_a_marker_that_is_a_special_token_is_seen(special: tuple[str, ...]) -> None:
    done, _ = answer(MISTRAL_CALL, TEMPLATE, special=special, tool_form="mistral")
    assert (done.choices[0].text, calls(done)) == ("", [("weather", {"city": "Oslo"})])


def test_an_answer_without_a_call_is_an_answer() -> None:
    done, _ = answer("It rains.")
    assert (done.choices[0].text, done.choices[0].tool_calls) == ("It rains.", ())
    assert done.choices[0].finish_reason is FinishReason.STOP


def test_without_a_choice_of_tools_they_are_neither_shown_nor_read() -> None:
    done, prompt = answer(HERMES_CALL, chat=dataclasses.replace(TOOLS, tool_choice=ToolChoice.NONE))
    assert prompt == "[user]water[/][assistant]"
    assert (done.choices[0].text, done.choices[0].tool_calls) == (HERMES_CALL, ())


def test_a_call_cut_short_by_the_limit_is_text() -> None:
    done, _ = answer(HERMES_CALL, sampling=SamplingParams(max_tokens=12))
    choice = done.choices[0]
    assert (choice.finish_reason, choice.tool_calls) == (FinishReason.LENGTH, ())
    assert HERMES_CALL.startswith(choice.text)


def test_one_call_at_a_time_if_so_asked() -> None:
    done, _ = answer(HERMES_CALL * 2, chat=dataclasses.replace(TOOLS, parallel_tool_calls=False))
    assert len(calls(done)) == 1
    assert len(calls(answer(HERMES_CALL * 2)[0])) == 2


def test_calls_have_ids_that_a_replay_repeats() -> None:
    first, second = answer(HERMES_CALL * 2)[0], answer(HERMES_CALL * 2)[0]
    ids = [call.id for call in first.choices[0].tool_calls]
    assert ids == [call.id for call in second.choices[0].tool_calls]
    assert len(set(ids)) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids), "as Mistral's templates want them"


def test_earlier_calls_and_their_answers_are_put_to_the_model() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    _, prompt = answer("x", messages=messages)
    made = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert prompt == f"[tool]weather[user]water[/][assistant]{made}[/][tool]rain[/][assistant]"


@pytest.mark.parametrize(
    ("template", "chat", "param"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TOOLS, "tools"),
        ("{{ tools }}{{ messages }}", TOOLS, "tools"),
    ],
)
def test_tools_that_the_model_cannot_use_are_refused(template: str, chat: ChatOptions, param: str) -> None:
    done, _ = answer("x", template, chat)
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("unsupported_option", param)
    assert done.error.message.startswith(f"{param} ")


MUST = dataclasses.replace(TOOLS, tool_choice=ToolChoice.REQUIRED)
STRICT = ChatOptions(tools=[{"function": WEATHER["function"] | {"strict": True}}])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("chat", "fields", "param"),
    [
        (TOOLS, {"grammar": Grammar.json_object().named("response_format")}, "tools"),
        (MUST, {"bad_words": ("Oslo",)}, "bad_words"),
        (STRICT, {"sampling": SamplingParams(allowed_token_ids=(5,))}, "allowed_token_ids"),
        (STRICT, {"stop": (".",)}, "stop"),
    ],
)
def test_what_contradicts_the_grammar_of_calls_is_refused(
    chat: ChatOptions, fields: dict[str, Any], param: str
) -> None:
    done, _ = answer("x", chat=chat, **fields)
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("invalid_value", param)


def test_a_grammar_goes_to_the_engine_where_a_call_must_be_right() -> None:
    for chat, wanted in ((TOOLS, False), (MUST, True), (STRICT, True)):
        tokenizer = small_chat(TEMPLATE)
        inner = ScriptedEngine(lambda request: [5], len(tokenizer.pieces()))
        LocalTextEngine(inner, tokenizer).add_many([TextRequest("x", messages=HELLO, chat=chat)])
        assert (inner.seen[0].grammar is not None) is wanted


def test_an_unknown_form_is_refused_with_those_known() -> None:
    with pytest.raises(EngineError, match="auto or one of hermes, llama3, mistral, not 'xml'"):
        ChatFormat(small_chat(TEMPLATE), "xml")


# -- reasoning ---------------------------------------------------------------------------------------------------------


def thought(done: TextCompletion) -> tuple[str | None, str]:
    assert done.error is None, done.error
    return done.choices[0].reasoning, done.choices[0].text


ON = ChatOptions(template_kwargs={"enable_thinking": True})


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["as text", "as special tokens"])
def test_a_thought_is_split_off(special: tuple[str, ...]) -> None:
    said = "<think>\nIt is wet.\n</think>\n\nWater."
    assert thought(answer(said, THINKING, ChatOptions(), special=special)[0]) == ("It is wet.", "Water.")


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["as text", "as special tokens"])
def test_a_thought_that_the_template_opened_is_split_off(special: tuple[str, ...]) -> None:
    done, prompt = answer("It is wet.\n</think>\n\nWater.", THINKING, ON, special=special)
    assert prompt.endswith("[assistant]<think>\n")
    assert thought(done) == ("It is wet.", "Water.")


def test_an_answer_that_ends_within_its_thought_is_all_thought() -> None:
    assert thought(answer("It is", THINKING, ON)[0]) == ("It is", "")


def test_an_answer_without_a_thought_is_left_alone() -> None:
    assert thought(answer("\nWater.", THINKING, ChatOptions())[0]) == (None, "\nWater.")
    opened = [{"role": "user", "content": "say <think>"}]
    assert thought(answer("Water.", THINKING, ChatOptions(), messages=opened)[0]) == (None, "Water.")


def test_a_model_that_does_not_think_may_write_the_tags() -> None:
    said = "<think>x</think>y"
    assert thought(answer(said, chat=ChatOptions())[0]) == (None, said)


def test_a_prompt_that_is_no_chat_is_answered_as_it_is() -> None:
    tokenizer = small_chat(THINKING)
    tokens = tokenizer.encode_rendered(["<think>x</think>y"])[0]
    engine = LocalTextEngine(ScriptedEngine(lambda request: tokens, len(tokenizer.pieces())), tokenizer)
    engine.add_many([TextRequest("x", prompt="go")])
    assert thought(engine.poll(10.0)[0]) == (None, "<think>x</think>y")


@pytest.mark.parametrize(
    ("begun", "said", "expected"),
    [
        ("<think>It is", " wet.</think>Water.", (" wet.", "Water.")),
        ("<think>x</think>It is", " wet.", (None, " wet.")),
        ("It is", " wet.", (None, " wet.")),
    ],
)
def test_a_message_that_is_continued_may_be_thinking(
    begun: str, said: str, expected: tuple[str | None, str]
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    done, prompt = answer(said, THINKING, ChatOptions(continue_final_message=True), messages=messages)
    assert prompt == f"[user]water[/][assistant]{begun}"
    assert thought(done) == expected


def test_calls_are_read_behind_a_thought() -> None:
    chat = dataclasses.replace(TOOLS, template_kwargs={"enable_thinking": True})
    done, _ = answer(f"I could {HERMES_CALL}?</think>\n{HERMES_CALL}", THINKING, chat)
    assert thought(done) == (f"I could {HERMES_CALL}?", "")
    assert len(calls(done)) == 1


# -- the template ------------------------------------------------------------------------------------------------------


def test_the_template_opens_the_answer_unless_told_not_to() -> None:
    assert answer("x", chat=ChatOptions(add_generation_prompt=False))[1] == "[user]water[/]"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt"])
def test_a_request_brings_no_template_of_its_own(name: str) -> None:
    done, _ = answer("x", chat=ChatOptions(template_kwargs={name: "{{ 1 }}"}))
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("invalid_value", f"chat_template_kwargs.{name}")


def test_a_template_of_the_operators_takes_the_place_of_the_models(smollm: Path, tmp_path: Path) -> None:
    template = tmp_path / "short.jinja"
    template.write_text("{{ messages[0].content }}!")
    tokenizer = Tokenizer.load(smollm, template.read_text())
    assert tokenizer.render_chat(HELLO) == "water!"
    config = EngineConfig(model=str(smollm), chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(EngineError, match=r"chat_template: .*none\.jinja cannot be read"):
        open_text_engine(config)


def test_a_chat_that_its_template_refuses_fails_alone() -> None:
    template = (
        TEMPLATE
        + "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    )
    tokenizer = small_chat(template)
    engine = LocalTextEngine(ScriptedEngine(lambda request: [5], len(tokenizer.pieces())), tokenizer)
    engine.add_many(
        [
            TextRequest("bad", messages=[{"role": "assistant", "content": "x"}]),
            TextRequest("good", messages=HELLO),
        ]
    )
    ended = {done.id: done.error for done in engine.poll(10.0) + engine.poll(10.0)}
    assert ended["good"] is None
    assert ended["bad"] is not None
    assert ended["bad"].message.endswith("roles must alternate")
