"""The form of an answer on the wire: one meaning, whichever of its names a producer uses."""

import json
from typing import Any

import orjson
import pytest

from headrace.schemas import ErrorCode, InvalidJob, PromptJob, Source, encode_job, parse_job
from headrace.schemas.answer_form import ANY_OBJECT, MAX_FORM_CHARS, MAX_FORM_CHOICES, AnswerForm

SOURCE = Source("t", 0, 1, 1_795_000_000_000)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1]}}}
TOOL = {"type": "function", "function": {"name": "weather"}}


def parse(**fields: Any) -> PromptJob:
    return parse_job(orjson.dumps({"prompt": "x"} | fields), None, SOURCE)


def line(**body: Any) -> PromptJob:
    body = {"messages": [{"role": "user", "content": "x"}]} | body
    record = {"custom_id": "1", "url": "/v1/chat/completions", "body": body}
    return parse_job(orjson.dumps(record), None, SOURCE)


def response_format(type: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": type, **fields}}


FORMS = [
    (response_format("text"), None),
    (response_format("json_object"), AnswerForm("response_format", "json_schema", ANY_OBJECT)),
    (
        response_format("json_schema", json_schema={"name": "x", "schema": SCHEMA, "strict": True}),
        AnswerForm("response_format.json_schema.schema", "json_schema", SCHEMA),
    ),
    (
        response_format("json_schema", json_schema={"schema": SCHEMA, "strict": False}, regex=None),
        AnswerForm("response_format.json_schema.schema", "json_schema", SCHEMA, strict=False),
    ),
    (response_format("regex", regex="a+"), AnswerForm("response_format.regex", "regex", "a+")),
    (response_format("choice", choice=["a", "b"]), AnswerForm("response_format.choice", "choice", ["a", "b"])),
    (response_format("grammar", grammar="start: A"), AnswerForm("response_format.grammar", "grammar", "start: A")),
    ({"structured_outputs": {"json": SCHEMA}}, AnswerForm("structured_outputs.json", "json_schema", SCHEMA)),
    (
        {"structured_outputs": {"json": orjson.dumps(SCHEMA).decode(), "json_object": False}},
        AnswerForm("structured_outputs.json", "json_schema", SCHEMA),
    ),
    ({"structured_outputs": {"regex": "a+"}}, AnswerForm("structured_outputs.regex", "regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, AnswerForm("structured_outputs.choice", "choice", ["a"])),
    ({"structured_outputs": {"grammar": "start: A"}}, AnswerForm("structured_outputs.grammar", "grammar", "start: A")),
    (
        {"structured_outputs": {"json_object": True}},
        AnswerForm("structured_outputs.json_object", "json_schema", ANY_OBJECT),
    ),
    ({"guided_json": SCHEMA}, AnswerForm("guided_json", "json_schema", SCHEMA)),
    ({"guided_regex": "a+"}, AnswerForm("guided_regex", "regex", "a+")),
    ({"guided_choice": ["a"]}, AnswerForm("guided_choice", "choice", ["a"])),
    ({"guided_grammar": "start: A"}, AnswerForm("guided_grammar", "grammar", "start: A")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "form"), FORMS, ids=str)
def test_every_name_of_a_form_means_the_same_in_jobs_and_batch_lines(
    fields: dict[str, Any], form: AnswerForm | None
) -> None:
    job = parse(**fields)
    assert job.answer_form == form
    assert line(**fields).answer_form == form
    _, value, headers = encode_job(job)
    assert parse_job(value, headers, SOURCE).answer_form == form


def test_a_form_is_called_as_its_producer_wrote_it() -> None:
    fields = response_format("json_schema", json_schema={"schema": SCHEMA})
    path = "response_format.json_schema.schema"
    assert parse(**fields).path_of(path) == path
    assert line(**fields).path_of(path) == f"body.{path}"


REFUSED = [
    ({"response_format": "json"}, ErrorCode.INVALID_TYPE, "response_format"),
    ({"response_format": {}}, ErrorCode.MISSING_FIELD, "response_format.type"),
    (response_format("yaml"), ErrorCode.INVALID_VALUE, "response_format.type"),
    (response_format("regex"), ErrorCode.MISSING_FIELD, "response_format.regex"),
    (response_format("regex", regex="a", choice=["a"]), ErrorCode.INVALID_VALUE, "response_format.choice"),
    (response_format("regex", regex=["a"]), ErrorCode.INVALID_TYPE, "response_format.regex"),
    (response_format("regex", regex=""), ErrorCode.INVALID_VALUE, "response_format.regex"),
    (response_format("regex", regex="a" * (MAX_FORM_CHARS + 1)), ErrorCode.INVALID_VALUE, "response_format.regex"),
    (response_format("json_schema"), ErrorCode.MISSING_FIELD, "response_format.json_schema"),
    (
        response_format("json_schema", json_schema={"name": "x"}),
        ErrorCode.MISSING_FIELD, "response_format.json_schema.schema",
    ),
    (
        response_format("json_schema", json_schema={"schema": "{}"}),
        ErrorCode.INVALID_TYPE, "response_format.json_schema.schema",
    ),
    (
        response_format("json_schema", json_schema={"schema": {"enum": ["x" * MAX_FORM_CHARS]}}),
        ErrorCode.INVALID_VALUE, "response_format.json_schema.schema",
    ),
    (response_format("choice", choice=[]), ErrorCode.INVALID_VALUE, "response_format.choice"),
    (response_format("choice", choice=["a", 1]), ErrorCode.INVALID_TYPE, "response_format.choice.1"),
    (response_format("choice", choice=["a"] * (MAX_FORM_CHOICES + 1)), ErrorCode.INVALID_VALUE, "response_format.choice"),
    (response_format("choice", choice=["x" * MAX_FORM_CHARS]), ErrorCode.INVALID_VALUE, "response_format.choice"),
    ({"structured_outputs": {}}, ErrorCode.MISSING_FIELD, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, ErrorCode.INVALID_VALUE, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, ErrorCode.INVALID_TYPE, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ErrorCode.INVALID_VALUE, "structured_outputs.choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, ErrorCode.INVALID_VALUE, "guided_choice"),
    (response_format("json_object") | {"guided_regex": "a"}, ErrorCode.INVALID_VALUE, "guided_regex"),
    ({"guided_json": SCHEMA, "sampling": {"banned_token_ids": [5]}}, ErrorCode.INVALID_VALUE, "sampling.banned_token_ids"),
    ({"guided_json": SCHEMA, "sampling": {"bad_words": ["x"]}}, ErrorCode.INVALID_VALUE, "sampling.bad_words"),
    (
        {"guided_json": SCHEMA, "sampling": {"allowed_token_ids": [1]}},
        ErrorCode.INVALID_VALUE, "sampling.allowed_token_ids",
    ),
    ({"sampling": response_format("json_object")}, ErrorCode.MISPLACED_OPTION, "sampling.response_format"),
    ({"guided_regex": "a", "embedding": {}}, ErrorCode.INVALID_VALUE, "guided_regex"),
    ({"guided_regex": "a", "continuations": ["b"]}, ErrorCode.INVALID_VALUE, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=str)
def test_what_is_no_form_is_refused_by_its_path(fields: dict[str, Any], code: ErrorCode, param: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.message.startswith(param)


def test_a_form_beside_tools_is_refused_unless_they_may_not_be_called() -> None:
    with pytest.raises(InvalidJob) as refused:
        line(guided_regex="a", tools=[TOOL])
    assert (refused.value.code, refused.value.param) == (ErrorCode.UNSUPPORTED_OPTION, "body.guided_regex")
    assert line(guided_regex="a", tools=[TOOL], tool_choice="none").answer_form is not None


@pytest.mark.parametrize(
    "place", ["response_format.json_schema.schema", "structured_outputs.json", "guided_json"]
)
def test_half_a_character_in_a_schema_is_no_text(place: str) -> None:
    value: object = {"enum": ["\ud800"]}
    for name in reversed(place.split(".")):
        value = {name: value} | ({"type": "json_schema"} if name == "json_schema" else {})
    with pytest.raises(InvalidJob) as refused:
        parse_job(json.dumps({"prompt": "x", **value}).encode(), None, SOURCE)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_TEXT, place)
