"""JSON that users send, and JSON that Kafka's readers and Postgres take."""

import json
import math
from typing import Any

import orjson
import pytest
from any_json import ANY_JSON
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import ErrorCode, Unparsable, clean_json, clean_text
from headrace.schemas.wire import MAX_DEPTH, MAX_RECORD_BYTES, dump, load_object, nested_too_deep


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, ErrorCode.EMPTY_VALUE),
        (b"", ErrorCode.EMPTY_VALUE),
        (b" \r\n", ErrorCode.EMPTY_VALUE),
        (b"\xff{}", ErrorCode.INVALID_ENCODING),
        ('{"a": "\xe9"}'.encode("latin-1"), ErrorCode.INVALID_ENCODING),
        ("{}".encode("utf-16"), ErrorCode.INVALID_ENCODING),
        (b"{", ErrorCode.INVALID_JSON),
        (b"{} {}", ErrorCode.INVALID_JSON),
        (b"{'prompt': 1}", ErrorCode.INVALID_JSON),
        (b"[" * 100_000, ErrorCode.NESTED_TOO_DEEP),
        (b'{"y": ' + b"[" * 300 + b"]" * 300 + b"}", ErrorCode.NESTED_TOO_DEEP),
        (b"[]", ErrorCode.NOT_AN_OBJECT),
        (b"null", ErrorCode.NOT_AN_OBJECT),
        (b"NaN", ErrorCode.NOT_AN_OBJECT),
        (b'"text"', ErrorCode.NOT_AN_OBJECT),
        (b" " * MAX_RECORD_BYTES + b"{}", ErrorCode.MESSAGE_TOO_LARGE),
    ],
)
def test_what_is_no_json_object_is_told_apart(value: bytes | None, code: ErrorCode) -> None:
    with pytest.raises(Unparsable) as caught:
        load_object(value)
    assert caught.value.code is code
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("value", "where"), [(b'{"a" 1}\r\n', "column 6"), (b'{\n"a" 1\n}\n', "line 2, column 5")]
)
def test_a_value_that_is_a_line_of_a_file_is_given_no_line_of_its_own(value: bytes, where: str) -> None:
    with pytest.raises(Unparsable, match=rf"is not JSON \({where}: "):
        load_object(value)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890.0}),
        (b'{"a": ' + b"9" * 10_000 + b"}", {"a": math.inf}),
        (b'{"a": 1e999}', {"a": math.inf}),
        (b'{"a": -Infinity}', {"a": -math.inf}),
        (b'{"a": "\\ud800"}', {"a": "\ud800"}),
    ],
)
def test_more_than_json_is_read_so_that_validation_can_name_the_field(
    value: bytes, parsed: dict[str, Any]
) -> None:
    assert load_object(value) == parsed


@given(st.binary())
def test_no_bytes_crash_the_reader(value: bytes) -> None:
    try:
        parsed: Any = load_object(value)
    except Unparsable as error:
        parsed = {"code": error.code}
    assert isinstance(parsed, dict)


def test_text_is_cleaned_of_what_postgres_refuses_and_of_nothing_else() -> None:
    assert clean_text("a\0b") == "a\ufffdb"
    assert clean_text("a\ud800b") == "a\ufffdb"
    assert clean_text("\\u0000 \x01 \U0001f41f") == "\\u0000 \x01 \U0001f41f"
    assert clean_text("\ud83d\udc1f") == "\U0001f41f"


def test_a_literal_backslash_u0000_survives() -> None:
    assert orjson.loads(dump({"a": "\\u0000"})) == {"a": "\\u0000"}
    assert orjson.loads(dump({"a": "\\u0000 \0"})) == {"a": "\\u0000 \ufffd"}


def test_numbers_that_json_has_no_form_for_are_null() -> None:
    assert clean_json([math.nan, -math.inf, 10**400, 2**64, True]) == [None, None, None, 2.0**64, True]


def test_what_is_nested_too_deep_to_be_written_is_cut() -> None:
    deep: Any = []
    for _ in range(2_000):
        deep = [deep]
    assert len(dump(deep)) < 2_000


@given(ANY_JSON)
def test_whatever_is_dumped_can_be_read_by_kafkas_readers_and_by_postgres(value: Any) -> None:
    data = dump({"value": value})
    assert orjson.loads(data) == json.loads(data)
    _assert_clean(orjson.loads(data))


def _assert_clean(value: Any) -> None:
    if isinstance(value, str):
        assert "\0" not in value
        value.encode()
    for item in (
        [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    ):
        _assert_clean(item)


@pytest.mark.parametrize(
    ("levels", "too_deep"), [(1, False), (MAX_DEPTH, False), (MAX_DEPTH + 1, True), (900, True)]
)
def test_depth_is_counted_in_objects_and_arrays(levels: int, too_deep: bool) -> None:
    value = b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)
    assert nested_too_deep(value, orjson.loads(value)) is too_deep


def test_a_wide_value_is_not_deep() -> None:
    value = orjson.dumps({"messages": [{"content": "[{"}] * 1_000})
    assert not nested_too_deep(value, load_object(value))
