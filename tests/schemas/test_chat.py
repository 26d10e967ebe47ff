"""Conversations on the wire: messages with their roles' fields, tools and the choice among them."""

from typing import Any

import orjson
import pytest

from headrace.schemas import ErrorCode, InvalidJob, PromptJob, Source, encode_job, parse_job
from headrace.schemas.chat import MAX_TOOLS
from headrace.schemas.result import Choice

SOURCE = Source("t", 0, 1, 1_795_000_000_000)
ASKED = {"role": "user", "content": "x"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "return": {"type": "string"},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def parse(**fields: Any) -> PromptJob:
    return parse_job(orjson.dumps({"messages": [ASKED], **fields}), None, SOURCE)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_conversation_with_tools_comes_through() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "c1"},
    ]
    job = parse(messages=messages, tools=[WEATHER], tool_choice=named("weather"), parallel_tool_calls=False)
    roles = [message.role for message in job.messages or ()]
    assert roles == ["system", "user", "assistant", "tool"]
    assert [message.text for message in job.messages or ()] == ["Be brief.", "x", "", "rain"]
    assert [tool.model_dump(exclude_unset=True) for tool in job.tools] == [WEATHER], "shown as it was written"
    again = parse_job(encode_job(job)[1], None, SOURCE)
    assert again.model_dump() == job.model_dump()


def test_arguments_may_be_an_object_or_its_json() -> None:
    function = {"name": "weather", "arguments": {"city": "Malmö"}}
    job = parse(messages=[ASKED, {"role": "assistant", "tool_calls": [{"function": function}]}])
    assert job.messages is not None
    assert job.messages[1].tool_calls[0].function.arguments == '{"city": "Malmö"}'


def test_an_openai_line_may_have_all_of_it() -> None:
    options = {
        "tools": [WEATHER],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
    }
    body = {"messages": [ASKED], **options}
    line = {"custom_id": "c", "url": "/v1/chat/completions", "body": body}
    job = parse_job(orjson.dumps(line), None, SOURCE)
    expected = parse(**options)
    assert {name: getattr(job, name) for name in options} == {
        name: getattr(expected, name) for name in options
    }


def with_message(**message: Any) -> dict[str, Any]:
    return {"messages": [ASKED, message]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (with_message(role="assistant"), ErrorCode.MISSING_FIELD, "messages.1.content"),
        (with_message(role="assistant", tool_calls=[]), ErrorCode.MISSING_FIELD, "messages.1.content"),
        (with_message(role="assistant", tool_calls={}), ErrorCode.INVALID_TYPE, "messages.1.tool_calls"),
        (with_message(role="assistant", tool_calls=[{}]), ErrorCode.MISSING_FIELD, "messages.1.tool_calls.0.function"),
        (
            with_message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            ErrorCode.INVALID_VALUE,
            "messages.1.tool_calls.0.function.arguments",
        ),
        (
            with_message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": 5}}]),
            ErrorCode.INVALID_TYPE,
            "messages.1.tool_calls.0.function.arguments",
        ),
        (with_message(role="user", content="x", tool_calls=[CALL]), ErrorCode.INVALID_VALUE, "messages.1.tool_calls"),
        (with_message(role="user", content="x", tool_call_id="c"), ErrorCode.INVALID_VALUE, "messages.1.tool_call_id"),
        (
            with_message(role="user", content="x", reasoning_content="c"),
            ErrorCode.INVALID_VALUE,
            "messages.1.reasoning_content",
        ),
        (
            with_message(role="assistant", content="x", function_call={"name": "f"}),
            ErrorCode.UNSUPPORTED_OPTION,
            "messages.1.function_call",
        ),
        ({"tools": {}}, ErrorCode.INVALID_TYPE, "tools"),
        ({"tools": [5]}, ErrorCode.INVALID_TYPE, "tools.0"),
        ({"tools": [{"type": "code_interpreter"}]}, ErrorCode.INVALID_VALUE, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, ErrorCode.MISSING_FIELD, "tools.0.function"),
        ({"tools": [named("get weather")]}, ErrorCode.INVALID_VALUE, "tools.0.function.name"),
        ({"tools": [named("weather\n")]}, ErrorCode.INVALID_VALUE, "tools.0.function.name"),
        ({"tools": [named("x" * 65)]}, ErrorCode.INVALID_VALUE, "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, ErrorCode.INVALID_VALUE, "tools.1.function.name"),
        ({"tools": [named(f"f{n}") for n in range(MAX_TOOLS + 1)]}, ErrorCode.INVALID_VALUE, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            ErrorCode.INVALID_TYPE,
            "tools.0.function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            ErrorCode.INVALID_VALUE,
            "tools.0.function.parameters.type",
        ),
        ({"tool_choice": "any", "tools": [WEATHER]}, ErrorCode.INVALID_VALUE, "tool_choice"),
        ({"tool_choice": 5, "tools": [WEATHER]}, ErrorCode.INVALID_VALUE, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, ErrorCode.MISSING_FIELD, "tool_choice.function"),
        ({"tool_choice": "required"}, ErrorCode.INVALID_VALUE, "tool_choice"),
        ({"tool_choice": named("clock"), "tools": [WEATHER]}, ErrorCode.INVALID_VALUE, "tool_choice.function.name"),
        ({"parallel_tool_calls": 1}, ErrorCode.INVALID_TYPE, "parallel_tool_calls"),
        ({"add_generation_prompt": "no"}, ErrorCode.INVALID_TYPE, "add_generation_prompt"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            ErrorCode.INVALID_VALUE,
            "add_generation_prompt",
        ),
        (
            {"continue_final_message": True, "messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]},
            ErrorCode.INVALID_VALUE,
            "continue_final_message",
        ),
        ({"continue_final_message": 1}, ErrorCode.INVALID_TYPE, "continue_final_message"),
        ({"chat_template_kwargs": []}, ErrorCode.INVALID_TYPE, "chat_template_kwargs"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(65)), 1)}, ErrorCode.INVALID_VALUE, "chat_template_kwargs"),
        ({"messages": None, "prompt": "x", "tools": [WEATHER]}, ErrorCode.INVALID_VALUE, "tools"),
        (
            {"messages": None, "prompt": "x", "chat_template_kwargs": {"a": 1}},
            ErrorCode.INVALID_VALUE,
            "chat_template_kwargs",
        ),
        ({"sampling": {"tools": [WEATHER]}}, ErrorCode.MISPLACED_OPTION, "sampling.tools"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_chat_is_named(fields: dict[str, Any], code: ErrorCode, param: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.message.startswith(f"{param} ")


def test_an_answer_that_only_calls_has_no_content_for_openai() -> None:
    choice = Choice.model_validate({"text": "", "finish_reason": "tool_calls", "tool_calls": [CALL]})
    assert choice.to_message() == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [CALL],
    }
    thought = Choice(text="x", finish_reason="stop", reasoning_content="hm")
    assert thought.to_message() == {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "reasoning_content": "hm",
    }
