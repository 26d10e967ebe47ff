"""Records that mean harm or are plainly wrong, in the middle of a batch: each ends alone, and the rest succeeds."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import raw_headers
from confluent_kafka import Producer
from pipeline import Pipeline, pipeline

from headrace.schemas import BatchClosed, CancelBatch, ErrorCode, topics, uuid7
from headrace.schemas.topics import MAX_LETTER_BYTES

Code = ErrorCode
Headers = list[tuple[str, bytes | None]]

# name: what is in the record, beside the custom id and the batch, and how it ends: code and param.
FAILED: dict[str, tuple[dict[str, Any] | bytes, str, str | None]] = {
    "no prompt": ({}, Code.MISSING_FIELD, "prompt"),
    "two prompts": ({"prompt": "x", "prompt_token_ids": [1]}, Code.INVALID_VALUE, "prompt_token_ids"),
    "prompt of 5 MB": ({"prompt": "x" * 5_000_000}, Code.INVALID_VALUE, "prompt"),
    "beyond the context": ({"prompt": "fail:context_length_exceeded"}, Code.CONTEXT_LENGTH_EXCEEDED, None),
    "unknown model": ({"prompt": "x", "model": "nobody"}, Code.UNKNOWN_MODEL, "model"),
    "unknown feature": ({"prompt": "x", "requires": ["magic"]}, Code.UNSUPPORTED_FEATURE, "requires.0"),
    "half a pair in the prompt": (b'{"prompt": "a\\ud800b"', Code.INVALID_TEXT, "prompt"),
    "half a pair in metadata": (
        b'{"prompt": "x", "metadata": {"k": "\\udfff"}',
        Code.INVALID_TEXT,
        "metadata",
    ),
    "half a pair for a name": (
        b'{"prompt": "x", "metadata": {"\\udfff": "v"}',
        Code.INVALID_TEXT,
        "metadata",
    ),
    "not a number": (
        b'{"prompt": "x", "sampling": {"temperature": NaN}',
        Code.INVALID_VALUE,
        "sampling.temperature",
    ),
    "endless": (b'{"prompt": "x", "sampling": {"top_p": -Infinity}', Code.INVALID_VALUE, "sampling.top_p"),
    "huge integer": (
        b'{"prompt": "x", "sampling": {"seed": 1' + b"0" * 5000 + b"}",
        Code.INVALID_TYPE,
        "sampling.seed",
    ),
    "huge limit": (
        {"prompt": "x", "sampling": {"max_tokens": 10**15}},
        Code.INVALID_VALUE,
        "sampling.max_tokens",
    ),
    "metadata of 17": (
        {"prompt": "x", "metadata": {str(n): "" for n in range(17)}},
        Code.INVALID_VALUE,
        "metadata",
    ),
    "long metadata": ({"prompt": "x", "metadata": {"k": "v" * 513}}, Code.INVALID_VALUE, "metadata"),
    "long metadata name": ({"prompt": "x", "metadata": {"k" * 65: "v"}}, Code.INVALID_VALUE, "metadata"),
    "deep metadata": ({"prompt": "x", "metadata": {"k": {"k": {}}}}, Code.INVALID_TYPE, "metadata"),
    "no time": ({"prompt": "x", "deadline": "tomorrow"}, Code.INVALID_VALUE, "deadline"),
    "past deadline": ({"prompt": "x", "deadline": "2026-01-01T00:00:00Z"}, Code.DEADLINE_EXCEEDED, None),
}
SUCCEEDED: dict[str, dict[str, Any] | bytes] = {
    "plain": {"prompt": "x"},
    "unknown fields": {"prompt": "x", "colour": "blue", "nested": {"a": [1]}},
    "newer schema": {"prompt": "x", "schema_version": 9, "sampling": {"newer": True}},
    "key twice": b'{"prompt": "first", "prompt": "x"',
    "a pair of halves": b'{"prompt": "\\ud83d\\udc1f"',
    "NUL": {"prompt": "a\0b \\u0000", "metadata": {"n": "a\0b"}},
    "huge number in an unknown field": b'{"prompt": "x", "huge": 1' + b"0" * 400 + b', "infinite": 1e999',
    "byte order mark": b'\xef\xbb\xbf{"prompt": "x"',
}
REJECTED: dict[str, tuple[bytes | None, str]] = {
    "latin-1": ('{"prompt": "caf\xe9"}'.encode("latin-1"), Code.INVALID_ENCODING),
    "utf-16": ('{"prompt": "x"}'.encode("utf-16"), Code.INVALID_ENCODING),
    "cut off": (b'{"prompt": "cut o', Code.INVALID_JSON),
    "two objects": (b"{} {}", Code.INVALID_JSON),
    "NUL bytes": (b"\0" * 64, Code.INVALID_JSON),
    "list": (b"[1, 2]", Code.NOT_AN_OBJECT),
    "null": (b"null", Code.NOT_AN_OBJECT),
    "empty": (b"", Code.EMPTY_VALUE),
    "tombstone": (None, Code.EMPTY_VALUE),
    "deep": (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", Code.NESTED_TOO_DEEP),
    "bottomless": (b'{"a":' * 500_000, Code.NESTED_TOO_DEEP),
    "17 MiB": (b'{"prompt": "x"}' + b" " * (17 * 2**20), Code.MESSAGE_TOO_LARGE),
    "old id": (b'{"prompt": "x", "job_id": "%s"}' % str(uuid7(1)).encode(), Code.JOB_ID_OUT_OF_RANGE),
}


@pytest.fixture
def line(kafka: str, database_url: str) -> Iterator[Pipeline]:
    """A pipeline whose topics take larger records than the contract does."""
    with pipeline(kafka, database_url, largest=MAX_LETTER_BYTES) as made:
        settings = {"bootstrap.servers": kafka, "log_level": 0, "message.max.bytes": MAX_LETTER_BYTES}
        made.producer = Producer(settings)
        made.start_process(role="recorder")
        yield made


def record(name: str, fields: dict[str, Any] | bytes) -> bytes:
    """The record of custom id ``name``; bytes lack the last brace, where the custom id goes."""
    if isinstance(fields, bytes):
        return fields + b', "custom_id": %s}' % json.dumps(name).encode()
    return json.dumps({**fields, "custom_id": name}).encode()


def in_batch(name: str) -> Headers:
    return [(topics.BATCH_ID, b"b"), (topics.CUSTOM_ID, name.encode()), ("x-mine", b"\x00\xff")]


def close(line: Pipeline, expected: int) -> None:
    line.flush()
    line.control(BatchClosed(batch_id="b", expected=expected))
    line.wait_for(lambda: (batch := line.ledger.batch("default", "b")) and batch.complete)
    line.wait_for(lambda: line.lag() == 0)


def test_each_bad_record_ends_alone_with_a_code_and_the_rest_of_its_batch_succeeds(line: Pipeline) -> None:
    worker = line.start_worker()
    names = [*FAILED, *SUCCEEDED, *REJECTED]
    for name in sorted(names, key=len):
        if name in REJECTED:
            line.send(REJECTED[name][0], headers=in_batch(name), key=b"\xfekey")
        else:
            fields = FAILED[name][0] if name in FAILED else SUCCEEDED[name]
            line.send(record(name, fields), headers=in_batch(name))
    close(line, len(names))
    results = {result.custom_id: result for (result,) in line.results(len(FAILED) + len(SUCCEEDED)).values()}
    letters = {
        dict(letter.headers())[topics.CUSTOM_ID].decode(): letter
        for letter in line.dead_letters(len(REJECTED))
    }
    worker.close()

    for name, (_, code, param) in FAILED.items():
        error = results[name].error
        assert error is not None, name
        assert (name, error.code, error.param) == (name, code, param)
    unexpected = {name: results[name].error for name in SUCCEEDED if results[name].error is not None}
    assert unexpected == {}
    assert results["key twice"].choices[0].text == "echo: x"
    assert results["NUL"].choices[0].text == "echo: a\ufffdb \\u0000"
    assert results["NUL"].metadata == {"n": "a\ufffdb"}
    for name, (value, code) in REJECTED.items():
        headers = dict(letters[name].headers())
        assert letters[name].value() == value
        assert letters[name].key() == b"\xfekey"
        assert headers["x-mine"] == b"\x00\xff"
        assert (name, headers[topics.DEAD_CODE]) == (name, code.encode())
        assert headers[topics.DEAD_TOPIC].decode() == line.topics.jobs("standard")
        assert int(headers[topics.DEAD_OFFSET]) >= 0
        assert headers[topics.DEAD_MESSAGE]
    batch = line.ledger.batch("default", "b")
    assert batch is not None
    assert (batch.succeeded, batch.rejected) == (len(SUCCEEDED), len(REJECTED))
    assert (batch.failed, batch.expired) == (len(FAILED) - 1, 1)


def test_names_given_twice_in_a_batch_hurt_nobody(line: Pipeline) -> None:
    worker = line.start_worker()
    for job_id, prompt in (("same", "x"), ("same", "x"), ("same", "other"), ("one", "x"), ("two", "y")):
        line.send(
            {"job_id": job_id, "custom_id": "twice", "prompt": prompt},
            headers=[(topics.BATCH_ID, b"b")],
            partition=0,
        )
    close(line, 4)
    results = [result for copies in line.results(3).values() for result in copies]
    (letter,) = line.dead_letters(1)
    worker.close()

    assert sorted(result.choices[0].text for result in results) == ["echo: x", "echo: x", "echo: y"]
    assert {result.custom_id for result in results} == {"twice"}
    assert dict(letter.headers())[topics.DEAD_CODE].decode() == Code.DUPLICATE_JOB_ID


HEADERS: dict[str, tuple[Headers, str | None, str | None]] = {
    "none": ([], None, None),
    "without a value": ([(topics.TENANT, None), (topics.CUSTOM_ID, b""), ("traceparent", None)], None, None),
    "given twice": ([(topics.CUSTOM_ID, b"a"), (topics.CUSTOM_ID, b"b")], None, None),
    "a trace that is none": ([("traceparent", b"\xff\0" * 100), ("tracestate", b"")], None, None),
    "a run that is none": ([(topics.RUN, b"-1"), (topics.REPLAY_OF, b"9/9/9")], None, None),
    "a run of nothing": ([(topics.RUN, b"2"), (topics.REPLAY_OF, b"a/b/c/d")], None, None),
    "a letter's": ([(topics.DEAD_CODE, b"\xff"), (topics.DEAD_OFFSET, b"x")], None, None),
    "many": ([(f"x-{n}", b"v" * 100) for n in range(1000)], None, None),
    "a long tenant": ([(topics.TENANT, b"t" * 100_000)], Code.INVALID_VALUE, "tenant"),
    "a deadline that is none": ([(topics.DEADLINE, b"soon")], Code.INVALID_VALUE, "deadline"),
    "no UTF-8": ([(topics.CUSTOM_ID, b"\xff")], Code.INVALID_ENCODING, None),
}


def test_headers_missing_or_malformed_cost_their_own_record_at_most(line: Pipeline) -> None:
    worker = line.start_worker()
    for name, (headers, _, _) in HEADERS.items():
        line.send({"prompt": name}, headers=[(topics.BATCH_ID, b"b"), *headers])
    close(line, len(HEADERS))
    results = [result for (result,) in line.results(len(HEADERS) - 1).values()]
    (letter,) = line.dead_letters(1)
    worker.close()

    succeeded = {result.choices[0].text.removeprefix("echo: ") for result in results if result.choices}
    assert succeeded == {name for name, (_, code, _) in HEADERS.items() if code is None}
    failed = {(result.error.code, result.error.param) for result in results if result.error is not None}
    assert failed == {(Code.INVALID_VALUE, "tenant"), (Code.INVALID_VALUE, "deadline")}
    assert dict(letter.headers())[topics.DEAD_CODE].decode() == Code.INVALID_ENCODING
    assert b"no UTF-8" in letter.value()


@pytest.mark.skipif(raw_headers.library() is None, reason="librdkafka is the system's, not the client's own")
def test_a_header_whose_name_is_no_text_rejects_its_record_and_stops_nobody(line: Pipeline) -> None:
    worker = line.start_worker()
    value = b'{"prompt": "x", "batch_id": "b"}'
    headers = [(b"\xff\xfe", b"v"), (topics.BATCH_ID.encode(), b"b")]
    raw_headers.send(line.bootstrap, line.topics.jobs("standard"), value, headers)
    good = line.submit("hello")
    line.wait_terminal(1)
    (letter,) = line.dead_letters(1)
    line.wait_for(lambda: line.query("SELECT count(*) FROM rejections") == [(1,)])
    worker.close()

    assert line.rows() == {good: "succeeded"}
    assert letter.value() == value
    assert dict(letter.headers())[topics.DEAD_CODE].decode() == Code.INVALID_ENCODING


def test_a_dead_letter_may_be_as_large_as_a_record_may(line: Pipeline) -> None:
    worker = line.start_worker()
    value = b"x" * (15 * 2**20)
    line.send(value, headers=[("x-large", b"h" * 500_000)])
    line.flush()
    (letter,) = line.dead_letters(1)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()
    assert letter.value() == value
    assert dict(letter.headers())["x-large"] == b"h" * 500_000


def test_control_messages_that_are_none_stop_nobody(line: Pipeline) -> None:
    worker = line.start_worker()
    for value in (
        b"\xff",
        b"",
        None,
        b"[]",
        b'{"type": "cancel_batch"}',
        b'{"a":' * 100_000,
        b'{"type": ["x"]}',
    ):
        line.producer.produce(line.topics.control, value=value, headers=[("x", b"\xff")])
    line.flush()
    line.wait_for(lambda: line.query("SELECT count(*) FROM rejections") == [(7,)])
    slow = line.submit("slow:1000000", batch_id="b")
    line.wait_for(lambda: worker.engines and worker.engine.seen == [str(slow)])
    line.control(CancelBatch(batch_id="b"))
    line.wait_terminal(1)
    worker.close()
    assert line.rows() == {slow: "cancelled"}
