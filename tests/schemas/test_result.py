"""What comes back, on Kafka and in OpenAI's form."""

from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from headrace.schemas import (
    Choice,
    JobError,
    JobKind,
    JobResult,
    JobState,
    Timings,
    UnreadableResult,
    Usage,
    uuid7,
)
from headrace.schemas.result import LikelyToken, TokenLogprob

ID = uuid7()


def succeeded(**changes: Any) -> JobResult:
    return JobResult(
        **{
            "id": ID,
            "batch_id": "b",
            "custom_id": "c",
            "model": "m",
            "kind": JobKind.CHAT,
            "state": JobState.SUCCEEDED,
            "choices": [Choice(text="four", finish_reason="stop")],
            "usage": Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2),
            "timings": Timings(finished_at=datetime(2027, 1, 15, 8, tzinfo=UTC), total_s=0.5),
            **changes,
        }
    )


def test_a_result_reads_back_as_it_was_written() -> None:
    result = succeeded(run=2, attempt=3, worker="w")
    assert JobResult.decode(result.encode()) == result
    assert result.key == str(ID).encode()
    assert dict(result.headers)["headrace-batch-id"] == b"b"


def test_a_result_holds_nothing_that_postgres_refuses() -> None:
    result = succeeded(
        choices=[Choice(text="a\0b\ud800\\u0000", finish_reason="stop")], metadata={"\0": "\ud800"}
    )
    body = orjson.loads(result.encode())
    assert body["choices"][0]["text"] == "a\ufffdb\ufffd\\u0000"
    assert body["metadata"] == {"\ufffd": "\ufffd"}


def test_a_field_without_a_value_is_left_out() -> None:
    failed = JobResult(id=ID, state=JobState.FAILED, error=JobError(code="invalid_value", message="m"))
    assert {"choices", "metadata", "batch_id", "worker"}.isdisjoint(orjson.loads(failed.encode()))
    assert JobResult.decode(failed.encode()) == failed


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"\xff", b'{"id": 5}', b'{"id": "x", "state": "succeeded"}']
)
def test_bytes_that_are_no_result_say_so(value: bytes) -> None:
    with pytest.raises(UnreadableResult):
        JobResult.decode(value)


def test_a_newer_result_is_read_for_what_is_known() -> None:
    value = orjson.dumps({"id": str(ID), "state": "failed", "schema_version": 2, "newer": [1]})
    assert JobResult.decode(value).state is JobState.FAILED


def test_an_answered_chat_is_openais_chat_completion() -> None:
    assert succeeded().to_openai() == {
        "id": f"batch_req_{ID}",
        "custom_id": "c",
        "response": {
            "status_code": 200,
            "request_id": str(ID),
            "body": {
                "id": f"chatcmpl-{ID}",
                "object": "chat.completion",
                "created": 1_800_000_000,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "four", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 2,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 3},
                },
            },
        },
        "error": None,
    }


def test_an_answered_completion_is_openais_text_completion() -> None:
    body = succeeded(kind=JobKind.COMPLETION).to_openai()["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "four", "logprobs": None, "finish_reason": "stop"}]


def test_a_completions_likeliest_tokens_have_the_chosen_one_among_them() -> None:
    first = TokenLogprob(token="The", token_id=1)
    likeliest = [
        LikelyToken(token=" a", token_id=2, logprob=-0.5),
        LikelyToken(token=" b", token_id=3, logprob=-1),
    ]
    unlikely = TokenLogprob(token=" z", token_id=9, logprob=-7, top_logprobs=likeliest)
    likely = TokenLogprob(token=" a", token_id=2, logprob=-0.5, top_logprobs=likeliest)
    choice = Choice(text="The z a", finish_reason="length", logprobs=[first, unlikely, likely])
    body = succeeded(kind=JobKind.COMPLETION, choices=[choice]).to_openai()["response"]["body"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["The", " z", " a"],
        "token_logprobs": [None, -7, -0.5],
        "top_logprobs": [None, {" z": -7, " b": -1, " a": -0.5}, {" b": -1, " a": -0.5}],
        "text_offset": [0, 3, 5],
    }


@pytest.mark.parametrize("kind", [JobKind.CHAT, JobKind.COMPLETION])
@pytest.mark.parametrize("stop", ["END", 0])
def test_a_stop_of_the_jobs_own_is_named_in_openais_form_too(kind: JobKind, stop: str | int) -> None:
    choices = [Choice(text="four", finish_reason="stop", stop_reason=stop)]
    body = succeeded(kind=kind, choices=choices).to_openai()["response"]["body"]
    assert body["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        (JobState.FAILED, JobError(code="invalid_value", message="m", param="p"), "invalid_value"),
        (JobState.EXPIRED, JobError(code="deadline_exceeded", message="m"), "batch_expired"),
        (JobState.CANCELLED, JobError(code="cancelled", message="m"), "batch_cancelled"),
        (JobState.FAILED, None, "failed"),
    ],
)
def test_any_other_end_is_a_line_of_openais_error_file(
    state: JobState, error: JobError | None, code: str
) -> None:
    line = succeeded(state=state, choices=[], error=error).to_openai()
    assert (line["custom_id"], line["response"], line["error"]["code"]) == ("c", None, code)
    assert line["error"]["message"]
