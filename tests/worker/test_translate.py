"""The wire's words and the engine's, put into each other."""

import orjson
import pytest

from headrace.engine.answers import TextChoice
from headrace.engine.chat import ChatOptions, ToolChoice
from headrace.engine.chat import ToolCall as EngineCall
from headrace.engine.generate import EXPIRED
from headrace.engine.request import FinishReason
from headrace.engine.text_engine import RequestError, TextCompletion, TextRequest
from headrace.engine.token_logprobs import TokenLogprob
from headrace.schemas import JobKind, JobResult, JobState, PromptJob, Source, parse_job, uuid7
from headrace.worker import translate
from headrace.worker.outcomes import VERDICTS

SOURCE = Source("t", 0, 7, timestamp_ms=-1)


def job(body: bytes) -> PromptJob:
    return parse_job(body, None, SOURCE)


def answer(**changes: object) -> TextCompletion:
    choice = TextChoice(0, "hi", [1, 2], FinishReason.STOP, "END")
    return TextCompletion("1", [choice], 8, 3, 2, total_s=1.5, **changes)  # type: ignore[arg-type]


def test_everything_a_job_asks_for_reaches_the_engine() -> None:
    body = b"""{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "tenant": "acme", "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "max_tokens": 7, "min_tokens": 2, "seed": 3, "stop": ["END"], "stop_token_ids": [4], "ignore_eos": true,
        "include_stop_str_in_output": true, "n": 2, "repetition_penalty": 1.5, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "logit_bias": {"7": -1.5}, "allowed_token_ids": [7, 8], "bad_words": ["no"],
        "banned_token_ids": [6],
        "logprobs": true, "top_logprobs": 3, "skip_special_tokens": false, "truncate_prompt_tokens": 9}}"""
    request = translate.to_request(job(body), "id", priority=2, deadline_s=4e9)
    assert (request.id, request.priority, request.salt, request.deadline) == ("id", 2, "acme", 4e9)
    assert list(request.messages or ()) == [{"role": "user", "content": "a\nb"}]
    assert (request.prompt, request.prompt_token_ids, request.stop) == (None, None, ("END",))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (7, 2, 3)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.include_stop) == ((4,), True, True)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        0.1,
        0.2,
    )
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.logprobs) == (((7, -1.5),), (7, 8), 3)
    assert sampling.banned_token_ids == (6,)
    assert (request.n, request.bad_words, request.truncate_prompt_tokens) == (2, ("no",), 9)
    assert (request.skip_special_tokens, request.echo) == (False, False)
    echoed = job(b'{"prompt": "x", "sampling": {"echo": true}}')
    assert translate.to_request(echoed, "id").echo


def test_a_chat_reaches_the_engine_as_templates_expect_it() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "c", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    body = {
        "messages": [
            {"role": "user", "content": "x", "name": "Ada"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "c"},
        ],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = translate.to_request(job(orjson.dumps(body)), "id")
    arguments = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert list(request.messages or ()) == [
        {"role": "user", "content": "x", "name": "Ada"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": arguments, "id": "c"}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    assert request.chat == ChatOptions(
        tools=[tool],
        tool_choice=ToolChoice.REQUIRED,
        only_tool="weather",
        parallel_tool_calls=False,
        continue_final_message=True,
        template_kwargs={"enable_thinking": False},
    )


def test_calls_and_thoughts_come_with_the_result() -> None:
    called = TextChoice(
        0,
        "",
        [4],
        FinishReason.TOOL_CALLS,
        None,
        reasoning="hm",
        tool_calls=(EngineCall("c", "f", '{"a": 1}'),),
    )
    asked = job(b'{"messages": [{"role": "user", "content": "x"}]}')
    result = translate.succeeded(asked, TextCompletion("1", [called], 8, 3, 4), model="m")
    assert JobResult.decode(result.encode()) == result
    body = result.to_openai()["response"]["body"]
    assert body["choices"][0]["message"]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"


def test_log_probabilities_come_with_the_result_and_in_openais_forms() -> None:
    half = TokenLogprob(9, b"\xf0\x9f", -3.0)
    tokens = [
        TokenLogprob(4, b"he", -0.5, (TokenLogprob(4, b"he", -0.5), half)),
        TokenLogprob(9, b"\xf0\x9f", -3.0),
    ]
    choices = [TextChoice(n, "he", [4, 9], FinishReason.LENGTH, None, tokens) for n in range(2)]
    asked = job(b'{"messages": [{"role": "user", "content": "x"}]}')
    result = translate.succeeded(asked, TextCompletion("1", choices, 8, 3, 4), model="m")
    assert JobResult.decode(result.encode()) == result
    assert [choice.index for choice in result.choices] == [0, 1]
    first, second = result.choices[1].logprobs or ()
    assert (first.token, first.token_id, first.logprob, first.bytes) == ("he", 4, -0.5, None)
    assert (second.token, second.bytes) == ("\ufffd", [0xF0, 0x9F])
    assert [other.token_id for other in first.top_logprobs] == [4, 9]

    body = result.to_openai()["response"]["body"]
    assert body["choices"][1]["logprobs"] == {
        "content": [
            {
                "token": "he",
                "logprob": -0.5,
                "bytes": [104, 101],
                "top_logprobs": [
                    {"token": "he", "logprob": -0.5, "bytes": [104, 101]},
                    {"token": "\ufffd", "logprob": -3.0, "bytes": [0xF0, 0x9F]},
                ],
            },
            {"token": "\ufffd", "logprob": -3.0, "bytes": [0xF0, 0x9F], "top_logprobs": []},
        ],
        "refusal": None,
    }
    completion = result.model_copy(update={"kind": JobKind.COMPLETION}).to_openai()["response"]["body"]
    assert completion["choices"][0]["logprobs"] == {
        "tokens": ["he", "\ufffd"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"he": -0.5, "\ufffd": -3.0}, {"\ufffd": -3.0}],
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": "12345678", "sampling": {"max_tokens": 10}}', 13),
        (b'{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 10}}', 14),
        (b'{"messages": [{"role": "user", "content": "1234"}], "sampling": {"max_tokens": 10}}', 12),
        (
            b'{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 10, "n": 4, "truncate_prompt_tokens": 2}}',
            43,
        ),
        (b'{"prompt": "1234"}', 2 + translate.DEFAULT_ANSWER_TOKENS),
    ],
)
def test_a_job_is_charged_for_its_prompt_and_its_answer(body: bytes, tokens: int) -> None:
    assert translate.cost(job(body)) == tokens


def test_an_answer_becomes_a_result_with_everything_on_it() -> None:
    asked = job(b'{"prompt": "x", "custom_id": "c", "batch_id": "b", "metadata": {"k": "v"}}')
    result = translate.succeeded(asked, answer(), model="m", worker="w", run=2, attempt=3)
    assert result.state is JobState.SUCCEEDED
    assert (result.id, result.custom_id, result.batch_id, result.metadata) == (
        asked.envelope.id, "c", "b", {"k": "v"},
    )  # fmt: skip
    assert (result.run, result.attempt, result.model, result.worker) == (2, 3, "m", "w")
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (
        8,
        3,
        2,
    )
    (choice,) = result.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hi", "stop", "END")
    assert result.timings.started_at is not None
    assert result.timings.finished_at is not None
    assert (result.timings.finished_at - result.timings.started_at).total_seconds() == pytest.approx(1.5)


def test_a_line_of_a_file_is_answered_without_a_worker() -> None:
    request, asked = translate.read_line(b'{"custom_id": "c", "prompt": "x"}', 5)
    assert isinstance(request, TextRequest)
    line = translate.write_line(asked, answer(), "m")
    assert (line["custom_id"], line["state"], line["choices"][0]["text"]) == ("c", "succeeded", "hi")
    assert {"worker", "run", "timings"}.isdisjoint(line)


def test_an_id_of_any_age_is_fine_in_a_file() -> None:
    request, _ = translate.read_line(b'{"job_id": "%s", "prompt": "x"}' % str(uuid7(1)).encode(), 5)
    assert isinstance(request, TextRequest)


@pytest.mark.parametrize(
    ("text", "code", "custom_id"),
    [(b"{", "invalid_json", None), (b'{"custom_id": "c", "prompt": 5}', "invalid_type", "c")],
)
def test_a_bad_line_is_answered_with_what_could_be_read_of_it(
    text: bytes, code: str, custom_id: str | None
) -> None:
    error, asked = translate.read_line(text, 5)
    assert isinstance(error, RequestError)
    assert error.code == code
    line = translate.write_line(asked, TextCompletion("5", [], error=error), "m")
    assert (line["state"], line["error"]["code"], line.get("custom_id")) == ("failed", code, custom_id)


def test_a_line_that_expired_says_what_a_workers_job_says() -> None:
    request, asked = translate.read_line(b'{"custom_id": "c", "prompt": "x", "deadline": 1e9}', 5)
    assert isinstance(request, TextRequest)
    assert request.deadline == 1e9
    line = translate.write_line(asked, TextCompletion("5", [], error=EXPIRED), "m")
    verdict = VERDICTS[JobState.EXPIRED]
    assert (line["custom_id"], line["state"]) == ("c", "expired")
    assert line["error"] == {"code": verdict.code, "message": verdict.message}


def test_an_error_of_the_engine_keeps_the_names_of_its_job() -> None:
    _, asked = translate.read_line(b'{"custom_id": "c", "prompt": "x"}', 5)
    done = TextCompletion("5", [], error=RequestError("context_length_exceeded", "too long", "prompt"))
    line = translate.write_line(asked, done, "m")
    assert (line["custom_id"], line["error"]["param"], line.get("choices")) == ("c", "prompt", None)


LINE = b'{"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x"}}'


@pytest.mark.parametrize(
    ("body", "param", "path"),
    [
        (b'{"prompt": "x"}', "stop_token_ids[1]", "sampling.stop_token_ids.1"),
        (b'{"prompt": "x", "sampling": {"max_tokens": 9}}', "max_tokens", "sampling.max_tokens"),
        (
            b'{"prompt": "x", "sampling": {"max_completion_tokens": 9}}',
            "max_tokens",
            "sampling.max_completion_tokens",
        ),
        (b'{"prompt": "x"}', "logit_bias.70000", "sampling.logit_bias.70000"),
        (b'{"prompt": "x"}', "include_stop", "sampling.include_stop_str_in_output"),
        (b'{"prompt_token_ids": [9]}', "prompt_token_ids[0]", "prompt_token_ids.0"),
        (LINE, "stop_token_ids[1]", "body.stop_token_ids.1"),
        (LINE, "prompt", "body.prompt"),
    ],
)
def test_an_error_of_the_engine_calls_the_field_as_its_producer_wrote_it(
    body: bytes, param: str, path: str
) -> None:
    error = RequestError("invalid_value", f"{param} must be otherwise", param)
    found = translate.to_error(error, job(body))
    assert (found.param, found.message) == (path, f"{path} must be otherwise")
