"""What a job may ask for, and how it is told what it may not."""

import json
from typing import Any

import orjson
import pytest
from any_json import ANY_JSON
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.schemas import (
    Envelope,
    ErrorCode,
    InvalidJob,
    JobKind,
    PromptJob,
    Sampling,
    Source,
    Unparsable,
    encode_job,
    parse_envelope,
    parse_job,
)
from headrace.schemas.job import FEATURES, MAX_PROMPT_CHARS
from headrace.schemas.options import NOT_YET

SOURCE = Source("t", 0, 1, 1_795_000_000_000)


def parse(body: Any, headers: list[tuple[str, bytes | None]] | None = None) -> PromptJob:
    return parse_job(body if isinstance(body, bytes) else orjson.dumps(body), headers, SOURCE)


def refused(body: Any) -> InvalidJob:
    with pytest.raises(InvalidJob) as caught:
        parse(body)
    return caught.value


def test_a_job_with_everything_comes_through() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -5,
        "max_tokens": 10,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "n": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "8": 1.5},
        "allowed_token_ids": [7, 8, 9],
        "banned_token_ids": [5],
        "bad_words": ["c"],
        "logprobs": True,
        "top_logprobs": 5,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 100,
        "echo": False,
    }
    job = parse({"prompt": "x", "sampling": sampling, "metadata": {"a": "b"}, "requires": ["seed", "prompt"]})
    assert job.sampling == Sampling(**sampling)
    assert job.sampling.model_dump(exclude_none=True) == sampling
    assert job.metadata == {"a": "b"}


def test_what_is_left_out_is_left_to_the_model() -> None:
    sampling = parse({"prompt": "x"}).sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.stop) == (None, None, None, [])


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": "x"}, JobKind.COMPLETION),
        ({"prompt_token_ids": [1, 2]}, JobKind.COMPLETION),
        ({"messages": [{"role": "user", "content": "x"}]}, JobKind.CHAT),
        ({"prompt": "nul \0, literal \\u0000, fish \U0001f41f"}, JobKind.COMPLETION),
        ({"prompt": "x", "messages": None, "a_newer_field": {"deep": []}}, JobKind.COMPLETION),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "newer": 1}]},
            JobKind.CHAT,
        ),
    ],
)
def test_a_prompt_has_one_of_three_forms(body: dict[str, Any], kind: JobKind) -> None:
    job = parse(body)
    assert job.kind is kind
    assert (job.prompt, job.prompt_token_ids) == (body.get("prompt"), body.get("prompt_token_ids"))


def test_the_envelope_goes_with_the_job() -> None:
    value, headers = b'{"prompt": "x"}', [("headrace-batch-id", b"b"), ("headrace-job-id", b"j")]
    job = parse_job(value, headers, SOURCE)
    assert job.envelope == parse_envelope(value, headers, SOURCE)
    assert (job.batch_id, job.job_id) == ("b", "j")
    with pytest.raises(AttributeError, match="was not read from a record"):
        _ = PromptJob(prompt="x").envelope


def test_a_developer_speaks_as_the_system() -> None:
    job = parse(
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]}
    )
    assert [message.role for message in job.messages or ()] == ["system", "user"]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"prompt": "x", "job_id": "mine", "idempotency_key": "k"}, None),
        ({"prompt": "x", "idempotency_key": "k"}, [("headrace-job-id", b"mine")]),
        ({"custom_id": "c", "job_id": "mine", "idempotency_key": "k", "url": "/v1/completions", "body": {"prompt": "x"}}, None),
    ],
    ids=["ours", "a header", "openai"],
)  # fmt: skip
def test_a_job_has_one_name_so_that_a_key_beside_an_id_is_not_ignored(
    body: dict[str, Any], headers: list[tuple[str, bytes | None]] | None
) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse(body, headers)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_VALUE, "idempotency_key")
    assert "must not stand beside job_id" in caught.value.message
    assert caught.value.envelope.job_id == "mine"


def test_null_is_another_way_to_leave_a_field_out() -> None:
    fields = dict.fromkeys(PromptJob.model_fields.keys() - {"prompt"})
    assert parse({**fields, "prompt": "x"}).model_dump() == PromptJob(prompt="x").model_dump()
    assert parse({"prompt": "x", "sampling": dict.fromkeys(Sampling.model_fields)}).sampling == Sampling()


def test_one_stop_may_stand_alone_and_minus_one_keeps_all_tokens() -> None:
    sampling = parse({"prompt": "x", "sampling": {"stop": "END", "top_k": -1}}).sampling
    assert (sampling.stop, sampling.top_k) == (["END"], 0)


@pytest.mark.parametrize(
    "given", [{"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 5}]
)
def test_max_completion_tokens_is_max_tokens(given: dict[str, int]) -> None:
    assert parse({"prompt": "x", "sampling": given}).sampling.max_tokens == 5


BAD_SAMPLING: list[tuple[dict[str, Any], ErrorCode, str]] = [
    ({"temperature": -0.1}, ErrorCode.INVALID_VALUE, "temperature"),
    ({"temperature": 2.1}, ErrorCode.INVALID_VALUE, "temperature"),
    ({"temperature": "1"}, ErrorCode.INVALID_TYPE, "temperature"),
    ({"temperature": True}, ErrorCode.INVALID_TYPE, "temperature"),
    ({"top_p": 0}, ErrorCode.INVALID_VALUE, "top_p"),
    ({"top_p": 1.1}, ErrorCode.INVALID_VALUE, "top_p"),
    ({"top_k": -2}, ErrorCode.INVALID_VALUE, "top_k"),
    ({"top_k": 1.5}, ErrorCode.INVALID_TYPE, "top_k"),
    ({"min_p": -1}, ErrorCode.INVALID_VALUE, "min_p"),
    ({"seed": 2**63}, ErrorCode.INVALID_VALUE, "seed"),
    ({"seed": 1e30}, ErrorCode.INVALID_TYPE, "seed"),
    ({"max_tokens": 0}, ErrorCode.INVALID_VALUE, "max_tokens"),
    ({"max_tokens": 10**12}, ErrorCode.INVALID_VALUE, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, ErrorCode.INVALID_VALUE, "max_completion_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, ErrorCode.INVALID_VALUE, "min_tokens"),
    ({"max_completion_tokens": 5, "min_tokens": 6}, ErrorCode.INVALID_VALUE, "min_tokens"),
    ({"min_tokens": -1}, ErrorCode.INVALID_VALUE, "min_tokens"),
    ({"stop": 5}, ErrorCode.INVALID_TYPE, "stop"),
    ({"stop": ["a", 5]}, ErrorCode.INVALID_TYPE, "stop.1"),
    ({"stop": ""}, ErrorCode.INVALID_VALUE, "stop.0"),
    ({"stop": ["a"] * 17}, ErrorCode.INVALID_VALUE, "stop"),
    ({"stop": ["a" * 257]}, ErrorCode.INVALID_VALUE, "stop.0"),
    ({"stop_token_ids": [-1]}, ErrorCode.INVALID_VALUE, "stop_token_ids.0"),
    ({"stop_token_ids": ["a"]}, ErrorCode.INVALID_TYPE, "stop_token_ids.0"),
    ({"ignore_eos": 1}, ErrorCode.INVALID_TYPE, "ignore_eos"),
    ({"include_stop_str_in_output": "yes"}, ErrorCode.INVALID_TYPE, "include_stop_str_in_output"),
    ({"n": 0}, ErrorCode.INVALID_VALUE, "n"),
    ({"n": 129}, ErrorCode.INVALID_VALUE, "n"),
    ({"n": True}, ErrorCode.INVALID_TYPE, "n"),
    ({"repetition_penalty": 0}, ErrorCode.INVALID_VALUE, "repetition_penalty"),
    ({"repetition_penalty": 11}, ErrorCode.INVALID_VALUE, "repetition_penalty"),
    ({"presence_penalty": 2.1}, ErrorCode.INVALID_VALUE, "presence_penalty"),
    ({"presence_penalty": "1"}, ErrorCode.INVALID_TYPE, "presence_penalty"),
    ({"frequency_penalty": -2.1}, ErrorCode.INVALID_VALUE, "frequency_penalty"),
    ({"logit_bias": [1]}, ErrorCode.INVALID_TYPE, "logit_bias"),
    ({"logit_bias": {"word": 1}}, ErrorCode.INVALID_VALUE, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, ErrorCode.INVALID_VALUE, "logit_bias"),
    ({"logit_bias": {"0" * 5000: 1}}, ErrorCode.INVALID_VALUE, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, ErrorCode.INVALID_TYPE, "logit_bias"),
    ({"logit_bias": {"5": 101}}, ErrorCode.INVALID_VALUE, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, ErrorCode.INVALID_VALUE, "logit_bias"),
    ({"allowed_token_ids": []}, ErrorCode.INVALID_VALUE, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, ErrorCode.INVALID_VALUE, "allowed_token_ids.0"),
    ({"allowed_token_ids": 5}, ErrorCode.INVALID_TYPE, "allowed_token_ids"),
    ({"banned_token_ids": [-1]}, ErrorCode.INVALID_VALUE, "banned_token_ids.0"),
    ({"banned_token_ids": [5] * 1025}, ErrorCode.INVALID_VALUE, "banned_token_ids"),
    ({"bad_words": "word"}, ErrorCode.INVALID_TYPE, "bad_words"),
    ({"bad_words": [""]}, ErrorCode.INVALID_VALUE, "bad_words.0"),
    ({"bad_words": ["a"] * 129}, ErrorCode.INVALID_VALUE, "bad_words"),
    ({"logprobs": 21}, ErrorCode.INVALID_VALUE, "logprobs"),
    ({"logprobs": -1}, ErrorCode.INVALID_VALUE, "logprobs"),
    ({"logprobs": "true"}, ErrorCode.INVALID_TYPE, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, ErrorCode.INVALID_VALUE, "top_logprobs"),
    ({"top_logprobs": 5}, ErrorCode.INVALID_VALUE, "top_logprobs"),
    ({"logprobs": 2, "top_logprobs": 5}, ErrorCode.INVALID_VALUE, "top_logprobs"),
    ({"skip_special_tokens": 0}, ErrorCode.INVALID_TYPE, "skip_special_tokens"),
    ({"truncate_prompt_tokens": 0}, ErrorCode.INVALID_VALUE, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "5"}, ErrorCode.INVALID_TYPE, "truncate_prompt_tokens"),
    ({"echo": "yes"}, ErrorCode.INVALID_TYPE, "echo"),
    ({"prompt_logprobs": 21}, ErrorCode.INVALID_VALUE, "prompt_logprobs"),
    ({"prompt_logprobs": True}, ErrorCode.INVALID_TYPE, "prompt_logprobs"),
]


@pytest.mark.parametrize(("sampling", "code", "param"), BAD_SAMPLING)
def test_a_bad_sampling_option_is_named_with_what_is_allowed(
    sampling: dict[str, Any], code: ErrorCode, param: str
) -> None:
    error = refused({"prompt": "x", "sampling": sampling})
    assert (error.code, error.param) == (code, f"sampling.{param}")
    assert error.message.startswith(f"sampling.{param} must ")
    assert error.envelope.id == parse_envelope(orjson.dumps({"prompt": "x"}), None, SOURCE).id


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, ErrorCode.MISSING_FIELD, "prompt"),
        ({"prompt": ""}, ErrorCode.INVALID_VALUE, "prompt"),
        ({"prompt": 5}, ErrorCode.INVALID_TYPE, "prompt"),
        ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, ErrorCode.INVALID_VALUE, "prompt"),
        ({"prompt": "x", "messages": []}, ErrorCode.INVALID_VALUE, "messages"),
        ({"prompt": "x", "prompt_token_ids": [1]}, ErrorCode.INVALID_VALUE, "prompt_token_ids"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            ErrorCode.INVALID_VALUE,
            "messages",
        ),
        ({"prompt_token_ids": []}, ErrorCode.INVALID_VALUE, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -1]}, ErrorCode.INVALID_VALUE, "prompt_token_ids.1"),
        ({"prompt_token_ids": [1, 2**31]}, ErrorCode.INVALID_VALUE, "prompt_token_ids.1"),
        ({"prompt_token_ids": [1, "2"]}, ErrorCode.INVALID_TYPE, "prompt_token_ids.1"),
        ({"messages": "x"}, ErrorCode.INVALID_TYPE, "messages"),
        ({"messages": ["x"]}, ErrorCode.INVALID_TYPE, "messages.0"),
        ({"messages": [{"content": "x"}]}, ErrorCode.MISSING_FIELD, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, ErrorCode.MISSING_FIELD, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, ErrorCode.MISSING_FIELD, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, ErrorCode.INVALID_VALUE, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            ErrorCode.INVALID_VALUE,
            "messages.0.content.0.type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "x", "tool_calls": [1]},
                ]
            },
            ErrorCode.INVALID_TYPE,
            "messages.1.tool_calls.0",
        ),
        ({"prompt": "x", "sampling": 5}, ErrorCode.INVALID_TYPE, "sampling"),
        ({"prompt": "x", "embedding": []}, ErrorCode.INVALID_TYPE, "embedding"),
        ({"prompt": "x", "embedding": {"pooling": "max"}}, ErrorCode.INVALID_VALUE, "embedding.pooling"),
        ({"prompt": "x", "embedding": {"normalize": 1}}, ErrorCode.INVALID_TYPE, "embedding.normalize"),
        (
            {"prompt": "x", "embedding": {"dimensions": 64}},
            ErrorCode.UNSUPPORTED_OPTION,
            "embedding.dimensions",
        ),
        ({"prompt": "x", "embedding": {}, "continuations": ["y"]}, ErrorCode.INVALID_VALUE, "continuations"),
        ({"prompt": "x", "embedding": {}, "sampling": {"n": 2}}, ErrorCode.INVALID_VALUE, "sampling.n"),
        ({"embedding": {}}, ErrorCode.MISSING_FIELD, "prompt"),
        ({"inputs": ["x"]}, ErrorCode.INVALID_VALUE, "inputs"),
        ({"inputs": [], "embedding": {}}, ErrorCode.INVALID_VALUE, "inputs"),
        ({"inputs": "x", "embedding": {}}, ErrorCode.INVALID_TYPE, "inputs"),
        ({"prompt": "x", "inputs": ["x"], "embedding": {}}, ErrorCode.INVALID_VALUE, "inputs"),
        ({"prompt": "x", "continuations": "y"}, ErrorCode.INVALID_TYPE, "continuations"),
        ({"prompt": "x", "continuations": []}, ErrorCode.INVALID_VALUE, "continuations"),
        ({"prompt": "x", "continuations": ["y", ""]}, ErrorCode.INVALID_VALUE, "continuations.1"),
        ({"prompt": "x", "continuations": [[1, -1]]}, ErrorCode.INVALID_VALUE, "continuations.0.1"),
        ({"prompt": "x", "continuations": [5]}, ErrorCode.INVALID_TYPE, "continuations.0"),
        (
            {"prompt": "x", "continuations": ["y"], "sampling": {"max_tokens": 4}},
            ErrorCode.INVALID_VALUE,
            "sampling.max_tokens",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "sampling": {"echo": True}},
            ErrorCode.INVALID_VALUE,
            "sampling.echo",
        ),
        ({"prompt": "x", "schema_version": "1"}, ErrorCode.INVALID_TYPE, "schema_version"),
        ({"prompt": "x", "job_id": 5}, ErrorCode.INVALID_TYPE, "job_id"),
        ({"prompt": "x", "job_id": ""}, ErrorCode.INVALID_VALUE, "job_id"),
        ({"prompt": "x", "custom_id": "a\0b"}, ErrorCode.INVALID_VALUE, "custom_id"),
        ({"prompt": "x", "batch_id": "b" * 257}, ErrorCode.INVALID_VALUE, "batch_id"),
        ({"prompt": "x", "deadline": "tomorrow"}, ErrorCode.INVALID_VALUE, "deadline"),
        ({"prompt": "x", "deadline": 3600}, ErrorCode.INVALID_VALUE, "deadline"),
        ({"prompt": "x", "metadata": []}, ErrorCode.INVALID_TYPE, "metadata"),
        ({"prompt": "x", "metadata": {"a": 1}}, ErrorCode.INVALID_TYPE, "metadata"),
        ({"prompt": "x", "metadata": {"a" * 65: "b"}}, ErrorCode.INVALID_VALUE, "metadata"),
        (
            {"prompt": "x", "metadata": {str(key): "b" for key in range(17)}},
            ErrorCode.INVALID_VALUE,
            "metadata",
        ),
        ({"prompt": "x", "requires": "seed"}, ErrorCode.INVALID_TYPE, "requires"),
        ({"prompt": "x", "requires": ["seed", "magic"]}, ErrorCode.UNSUPPORTED_FEATURE, "requires.1"),
        ({"prompt": "x", "max_tokens": 5}, ErrorCode.MISPLACED_OPTION, "max_tokens"),
        ({"prompt": "x", "stop": "a"}, ErrorCode.MISPLACED_OPTION, "stop"),
        (b'{"prompt": "\\ud800"}', ErrorCode.INVALID_TEXT, "prompt"),
        (b'{"prompt": "x", "metadata": {"a": "\\udfff"}}', ErrorCode.INVALID_TEXT, "metadata"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            ErrorCode.INVALID_TEXT,
            "messages.0.content",
        ),
        (
            b'{"prompt": "x", "sampling": {"temperature": NaN}}',
            ErrorCode.INVALID_VALUE,
            "sampling.temperature",
        ),
        (
            b'{"prompt": "x", "sampling": {"seed": 1' + b"0" * 5_000 + b"}}",
            ErrorCode.INVALID_TYPE,
            "sampling.seed",
        ),
    ],
)
def test_a_bad_job_is_told_its_field(body: Any, code: ErrorCode, param: str | None) -> None:
    error = refused(body)
    assert (error.code, error.param) == (code, param)
    assert param is None or error.message.startswith(f"{param} ")
    assert len(error.message) < 1_000


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "path",
    [
        "job_id",
        "tenant",
        "metadata.a",
        "requires.0",
        "sampling.stop.0",
        "sampling.bad_words.0",
        "continuations.0",
        "guided_regex",
        "guided_choice.0",
        "response_format.json_schema.name",
        "structured_outputs.grammar",
        "messages.0.name",
        "messages.0.content.0.text",
        "messages.0.tool_calls.0.id",
        "messages.0.tool_calls.0.function.name",
        "messages.0.reasoning_content",
        "messages.0.tool_call_id",
        "tools.0.function.name",
        "tools.0.function.description",
        "tool_choice.function.name",
    ],
)
def test_half_a_surrogate_pair_is_refused_in_every_text(path: str) -> None:
    body: dict[str, Any] = {
        "metadata": {},
        "requires": ["x"],
        "sampling": {"stop": ["x"], "bad_words": ["x"]},
        "continuations": ["x"],
        "guided_choice": ["x"],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "structured_outputs": {},
        "messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}],
        "tools": [TOOL],
        "tool_choice": TOOL,
    }
    body = json.loads(json.dumps({name: body[name] for name in {path.partition(".")[0]} & body.keys()}))
    *outer, last = (int(step) if step.isdigit() else step for step in path.split("."))
    place: Any = body
    for step in outer:
        place = place[step]
    place[last] = "half \ud800 a pair"
    error = refused(json.dumps({"prompt": "x"} | body if "messages" not in body else body).encode())
    assert error.code == ErrorCode.INVALID_TEXT
    assert error.param == ("metadata" if path == "metadata.a" else path)
    assert "lone surrogate" in error.message


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_token_ids": ["a"] * 100},
        {"inputs": [5] * 100, "embedding": {}},
        {"messages": ["a"] * 100},
        {"messages": [{"role": "user", "content": ["a"] * 100}]},
        {"prompt": "x", "sampling": {"stop": [1] * 16}},
        {"prompt": "x", "sampling": {"stop_token_ids": ["a"] * 100}},
        {"prompt": "x", "sampling": {"allowed_token_ids": ["a"] * 100}},
        {"prompt": "x", "sampling": {"bad_words": [1] * 100}},
        {"prompt": "x", "sampling": {"logit_bias": dict.fromkeys("abcdefgh", "a")}},
        {"prompt": "x", "requires": [1] * 64},
        {"prompt": "x", "metadata": {str(key): 1 for key in range(100)}},
    ],
)
def test_a_thousand_mistakes_cost_no_more_than_one(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        PromptJob.model_validate(body)
    assert caught.value.error_count() == 1


def test_a_message_never_repeats_what_the_user_wrote() -> None:
    for body in (
        {"prompt": ["secret"]},
        {"prompt": "x", "metadata": {"secret": 1}},
        {"messages": [{"secret": 1}]},
    ):
        assert "secret" not in refused(body).message


@pytest.mark.parametrize("option", NOT_YET)
@pytest.mark.parametrize("where", ["sampling", None])
def test_an_option_that_is_not_carried_out_is_refused_by_name(option: str, where: str | None) -> None:
    wanted = {option: {"anything": "else"}}
    error = refused({"prompt": "x", **({where: wanted} if where else wanted)})
    param = f"{where}.{option}" if where else option
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_OPTION, param)
    assert error.message == f"{param} is not supported yet; leave it out"


@pytest.mark.parametrize("option", NOT_YET)
def test_a_value_that_asks_for_nothing_is_let_through(option: str) -> None:
    for value in (None, *NOT_YET[option]):
        assert parse({"prompt": "x", "sampling": {option: value}}).prompt == "x"


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": True}, 0),
        ({"logprobs": 1}, 1),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": 5, "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_are_asked_for_as_chats_do_or_as_completions_do(
    sampling: dict[str, Any], count: int | None
) -> None:
    assert parse({"prompt": "x", "sampling": sampling}).sampling.num_logprobs == count


def test_what_is_supported_is_not_also_refused() -> None:
    assert not NOT_YET.keys() & FEATURES


def test_a_job_may_require_anything_that_is_supported() -> None:
    assert parse({"prompt": "x", "requires": sorted(FEATURES)}).requires == sorted(FEATURES)


def test_a_newer_producers_job_is_read_for_what_is_known() -> None:
    assert parse({"prompt": "x", "schema_version": 9, "sampling": {"a_newer_option": 1}}).schema_version == 9


@pytest.mark.parametrize("field", ["prompt_uri", "input_file", "payload_ref", "$ref"])
@pytest.mark.parametrize(
    "place", ["file:///etc/passwd", "http://169.254.169.254/latest/meta-data/", "s3://bucket/key"]
)
def test_nothing_in_a_job_is_a_place_to_read_from(field: str, place: str) -> None:
    assert refused({field: place}).param == "prompt"
    job = parse({"prompt": place, field: place})
    assert (job.prompt, job.model_dump(exclude_defaults=True)) == (place, {"prompt": place})
    image = {"type": "image_url", "image_url": {"url": place}}
    error = refused({"messages": [{"role": "user", "content": [image]}]})
    assert error.param == "messages.0.content.0.type"


def test_encoding_a_job_and_reading_it_gives_the_job() -> None:
    job = PromptJob(
        job_id="j",
        tenant="acme",
        batch_id="b",
        custom_id="c\u00e9",
        messages=[{"role": "user", "content": "hi"}],
        sampling=Sampling(temperature=0, stop=["x"]),
        deadline="2027-01-31T12:00:00Z",
    )
    key, value, headers = encode_job(job)
    assert key == b"j"
    assert dict(headers)["headrace-custom-id"] == "c\u00e9".encode()
    parsed = parse_job(value, headers, SOURCE)
    assert parsed.model_dump() == job.model_dump()
    assert "schema_version" not in orjson.loads(value)


FIELDS = st.sampled_from(
    [*PromptJob.model_fields, *Sampling.model_fields, *NOT_YET, "url", "body", "method", "unknown"]
)


@given(st.dictionaries(FIELDS, ANY_JSON | st.dictionaries(FIELDS, ANY_JSON, max_size=3), max_size=5))
def test_no_json_crashes_the_reader_and_every_refusal_has_an_id(body: dict[str, Any]) -> None:
    value = json.dumps(body).encode()
    try:
        outcome: object = parse_job(value, None, SOURCE).envelope
    except InvalidJob as error:
        outcome = error.envelope
        error.message.encode()
    except Unparsable as error:
        # The id in it would have to be a UUIDv7 by chance.
        outcome = error.code
    assert isinstance(outcome, Envelope)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt_token_ids": [1, -1]},
            "prompt_token_ids.1 must be a whole number from 0 to 2,147,483,647: a token id of the model",
        ),
        (
            {"prompt": "x", "sampling": {"bad_words": ["a", ""]}},
            "sampling.bad_words.1 must be a string of 1 to 256 characters",
        ),
        (
            {"prompt": "x", "sampling": {"stop": [""]}},
            "sampling.stop.0 must be a string of 1 to 256 characters",
        ),
        (
            {"prompt": "x", "sampling": {"allowed_token_ids": ["a"]}},
            "sampling.allowed_token_ids.0 must be a whole number from 0 to 2,147,483,647: a token id of the model",
        ),
        ({"messages": ["x"]}, "messages.0 must be an object"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0 must be an object"),
        ({"prompt": "x", "requires": [1]}, "requires.0 must be a string"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be a list of 1 to 2,000,000 token ids"),
    ],
)
def test_an_item_at_fault_is_described_as_an_item(body: Any, message: str) -> None:
    assert refused(body).message == message
