"""Lines of OpenAI's batch format, read as jobs."""

from typing import Any

import orjson
import pytest

from headrace.schemas import ErrorCode, InvalidJob, JobKind, PromptJob, Source, parse_job

SOURCE = Source("t", 0, 1, 1_795_000_000_000)
CHAT: dict[str, Any] = {
    "custom_id": "c",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9},
}
COMPLETION: dict[str, Any] = {
    "custom_id": "c",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "hi", "stop": "END", "user": "u-1", "n": 1, "logit_bias": None},
}


def parse(line: dict[str, Any]) -> PromptJob:
    return parse_job(orjson.dumps(line), None, SOURCE)


def test_a_chat_line_is_a_chat_job() -> None:
    job = parse(CHAT)
    assert (job.kind, job.model, job.custom_id, job.sampling.max_tokens) == (JobKind.CHAT, "m", "c", 9)
    assert job.envelope.model == "m"


def test_a_completion_line_is_a_completion_job() -> None:
    job = parse(COMPLETION)
    assert (job.kind, job.prompt, job.sampling.stop) == (JobKind.COMPLETION, "hi", ["END"])


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_may_be_token_ids(prompt: list[Any]) -> None:
    assert parse({**COMPLETION, "body": {"prompt": prompt}}).prompt_token_ids == [1, 2, 3]


EMBEDDING: dict[str, Any] = {"custom_id": "c", "url": "/v1/embeddings", "body": {"model": "m", "input": "hi"}}


@pytest.mark.parametrize("given", ["hi", ["hi"], [1, 2], [[1, 2]]])
def test_an_embeddings_line_is_an_embedding_job(given: Any) -> None:
    job = parse(with_body(EMBEDDING, input=given, encoding_format="base64", user="u-1"))
    assert job.kind is JobKind.EMBEDDING
    assert (job.prompt, job.prompt_token_ids) in (("hi", None), (None, [1, 2]))
    assert job.embedding is not None
    assert (job.embedding.pooling, job.embedding.encoding_format) == ("last", "base64")


@pytest.mark.parametrize("given", [["hi", "there"], [[1, 2], [3]], ["hi", [1, 2]]])
def test_several_inputs_are_one_job(given: list[Any]) -> None:
    job = parse(with_body(EMBEDDING, input=given))
    assert job.kind is JobKind.EMBEDDING
    assert (job.inputs, job.prompt, job.prompt_token_ids) == (given, None, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "body.input"),
        ({"input": ["a", ""]}, "body.input.1"),
        ({"input": ["a", [1, -1]]}, "body.input.1.1"),
        ({"input": ["a", 5]}, "body.input.1"),
        ({"input": ["a"] * 2049}, "body.input"),
        ({"input": [1, -1]}, "body.input.1"),
        ({"input": 5}, "body.input"),
        ({"prompt": "x"}, "body.prompt"),
        ({"dimensions": 8}, "body.dimensions"),
        ({"pooling": "max"}, "body.pooling"),
        ({"temperature": 0.5}, "body.temperature"),
    ],
)
def test_what_is_wrong_with_an_embeddings_line_is_named_as_it_stands_there(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse(with_body(EMBEDDING, **body))
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param} ")


def test_a_line_may_carry_what_openais_format_has_no_place_for() -> None:
    job = parse({**CHAT, "batch_id": "b", "tenant": "acme", "job_id": "j", "metadata": {"a": "b"}})
    assert (job.batch_id, job.tenant, job.job_id, job.metadata) == ("b", "acme", "j", {"a": "b"})


def without(line: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != field}


def with_body(line: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**line, "body": {**line["body"], **fields}}


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (without(CHAT, "custom_id"), ErrorCode.MISSING_FIELD, "custom_id"),
        (without(CHAT, "url"), ErrorCode.MISSING_FIELD, "url"),
        (without(CHAT, "body"), ErrorCode.MISSING_FIELD, "body"),
        ({**CHAT, "method": "GET"}, ErrorCode.INVALID_VALUE, "method"),
        ({**CHAT, "url": "/v1/images"}, ErrorCode.UNSUPPORTED_URL, "url"),
        ({**CHAT, "url": ["/v1/completions"]}, ErrorCode.UNSUPPORTED_URL, "url"),
        ({**CHAT, "body": "{}"}, ErrorCode.INVALID_TYPE, "body"),
        ({**CHAT, "custom_id": 7}, ErrorCode.INVALID_TYPE, "custom_id"),
        ({**CHAT, "body": {"model": "m"}}, ErrorCode.MISSING_FIELD, "body.messages"),
        ({**COMPLETION, "body": {"model": "m"}}, ErrorCode.MISSING_FIELD, "body.prompt"),
        (with_body(CHAT, prompt="x"), ErrorCode.INVALID_VALUE, "body.prompt"),
        (with_body(COMPLETION, messages=[]), ErrorCode.INVALID_VALUE, "body.messages"),
        (with_body(COMPLETION, prompt=["a", "b"]), ErrorCode.UNSUPPORTED_OPTION, "body.prompt"),
        (with_body(COMPLETION, prompt=""), ErrorCode.INVALID_VALUE, "body.prompt"),
        (with_body(COMPLETION, prompt=[1, -1]), ErrorCode.INVALID_VALUE, "body.prompt.1"),
        (with_body(COMPLETION, prompt=[]), ErrorCode.INVALID_VALUE, "body.prompt"),
        (with_body(COMPLETION, prompt=5), ErrorCode.INVALID_TYPE, "body.prompt"),
        (with_body(CHAT, temperature=3), ErrorCode.INVALID_VALUE, "body.temperature"),
        (with_body(CHAT, model=3), ErrorCode.INVALID_TYPE, "body.model"),
        (with_body(CHAT, n=0), ErrorCode.INVALID_VALUE, "body.n"),
        (with_body(CHAT, sampling={"top_k": 1}), ErrorCode.MISPLACED_OPTION, "body.sampling"),
        (with_body(CHAT, extra_body={"top_k": 1}), ErrorCode.MISPLACED_OPTION, "body.extra_body"),
        (with_body(EMBEDDING, embedding={"pooling": "cls"}), ErrorCode.MISPLACED_OPTION, "body.embedding"),
        ({**CHAT, "temperature": 0}, ErrorCode.MISPLACED_OPTION, "temperature"),
        ({**CHAT, "sampling": {"temperature": 0}}, ErrorCode.MISPLACED_OPTION, "sampling"),
        ({**CHAT, "tools": []}, ErrorCode.MISPLACED_OPTION, "tools"),
        (with_body(CHAT, best_of=2), ErrorCode.UNSUPPORTED_OPTION, "body.best_of"),
        (with_body(CHAT, tools=[{}]), ErrorCode.MISSING_FIELD, "body.tools.0.type"),
        (
            with_body(CHAT, messages=[{"role": "user", "content": 5}]),
            ErrorCode.INVALID_TYPE,
            "body.messages.0.content",
        ),
    ],
)
def test_a_bad_line_is_told_its_field_where_it_stands(
    line: dict[str, Any], code: ErrorCode, param: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse(line)
    error = caught.value
    assert (error.code, error.param) == (code, param)
    assert error.message.startswith(f"{param} ")
    assert error.envelope.custom_id == (line.get("custom_id") if param != "custom_id" else None)
