"""What everybody but the engine reads of a job."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import (
    Envelope,
    ErrorCode,
    Source,
    Unparsable,
    job_key,
    named_key,
    parse_envelope,
    uuid7,
)
from headrace.schemas.envelope import MAX_ID_CHARS, parse_deadline
from headrace.schemas.ids import MAX_AGE_MS

NOW = 1_795_000_000_000
SOURCE = Source("t", 0, 1, NOW)


def envelope(body: dict[str, Any], headers: list[tuple[str, bytes | None]] | None = None) -> Envelope:
    return parse_envelope(orjson.dumps(body), headers, SOURCE)


def test_an_envelope_has_what_the_body_says() -> None:
    id = uuid7(NOW)
    found = envelope(
        {
            "job_id": str(id),
            "tenant": "acme",
            "batch_id": "b",
            "custom_id": "c",
            "model": "m",
            "deadline": "2027-01-31T12:00:00+02:00",
            "prompt": "x",
        }
    )
    assert found == Envelope(
        id=id,
        tenant="acme",
        job_id=str(id),
        batch_id="b",
        custom_id="c",
        model="m",
        deadline=datetime(2027, 1, 31, 10, tzinfo=UTC),
        content_sha=found.content_sha,
        submitted_at=datetime.fromtimestamp(NOW / 1000, UTC),
    )


def test_a_job_that_says_nothing_of_itself_is_named_by_its_place() -> None:
    found = envelope({"prompt": "x"})
    assert found.id == job_key("default", None, SOURCE)
    assert (found.tenant, found.job_id, found.batch_id, found.custom_id) == ("default", None, None, None)


def test_headers_say_what_the_body_does_not() -> None:
    headers = [
        ("headrace-tenant", b"acme"),
        ("headrace-job-id", b"j"),
        ("headrace-batch-id", b"b"),
        ("headrace-custom-id", b"c"),
        ("headrace-deadline", b"2027-01-31T12:00:00Z"),
    ]
    found = envelope({"prompt": "x", "custom_id": "mine", "batch_id": None}, [*headers])
    assert (found.tenant, found.job_id, found.batch_id, found.custom_id) == ("acme", "j", "b", "mine")
    assert found.id == named_key("acme", "j")
    assert found.deadline == datetime(2027, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("value", [None, b"", b"x" * 300])
def test_headers_that_make_no_sense_do_no_harm(value: bytes | None) -> None:
    found = envelope(
        {"prompt": "x"}, [("headrace-batch-id", value), ("headrace-deadline", value), ("other", b"\xff")]
    )
    assert found.batch_id is None
    assert found.deadline is None


@pytest.mark.parametrize("field", ["job_id", "tenant", "batch_id", "custom_id", "model", "idempotency_key"])
@pytest.mark.parametrize("value", [7, "", [], {"a": 1}, "x" * (MAX_ID_CHARS + 1), True])
def test_a_name_that_is_none_is_left_out(field: str, value: object) -> None:
    found = envelope({"prompt": "x", field: value})
    assert found.id == job_key("default", None, SOURCE)
    assert (found.tenant, getattr(found, field, None) or "default") == ("default", "default")


def test_names_are_clean() -> None:
    found = parse_envelope(b'{"batch_id": "a\\u0000b", "custom_id": "c\\ud800"}', None, SOURCE)
    assert (found.batch_id, found.custom_id) == ("a\ufffdb", "c\ufffd")


def test_an_unparsable_record_is_addressed_by_its_headers() -> None:
    headers: list[tuple[str, bytes | None]] = [("headrace-tenant", b"acme"), ("headrace-batch-id", b"b")]
    with pytest.raises(Unparsable) as caught:
        parse_envelope(b"{", headers, SOURCE)
    error = caught.value
    assert (error.code, error.tenant, error.batch_id, error.custom_id) == (
        ErrorCode.INVALID_JSON,
        "acme",
        "b",
        None,
    )


def test_a_header_that_is_not_utf8_rejects_the_record_and_names_no_batch() -> None:
    headers: list[tuple[str, bytes | None]] = [("headrace-tenant", b"acme"), ("headrace-batch-id", b"b\xff")]
    with pytest.raises(Unparsable, match="header headrace-batch-id is not UTF-8") as caught:
        parse_envelope(b'{"prompt": "x"}', headers, SOURCE)
    error = caught.value
    assert (error.code, error.tenant, error.batch_id) == (ErrorCode.INVALID_ENCODING, "acme", None)


def test_a_uuid7_of_another_age_is_rejected_under_its_batch() -> None:
    body = {"job_id": str(uuid7(NOW - MAX_AGE_MS - 1)), "batch_id": "b", "custom_id": "c"}
    with pytest.raises(Unparsable) as caught:
        envelope(body)
    error = caught.value
    assert (error.code, error.batch_id, error.custom_id) == (ErrorCode.JOB_ID_OUT_OF_RANGE, "b", "c")


def test_the_model_of_a_batch_line_is_in_its_body() -> None:
    line = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "x"},
    }
    assert envelope(line).model == "m"
    assert envelope({**line, "body": 3}).model is None


def sha(**changes: Any) -> bytes:
    return envelope(
        {"prompt": "x", "batch_id": "b", "sampling": {"seed": 1, "top_k": 2}, **changes}
    ).content_sha


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "j"},
        {"idempotency_key": "k"},
        {"deadline": "2027-01-31T12:00:00Z"},
        {"schema_version": 2},
        {"sampling": {"top_k": 2, "seed": 1}},
    ],
)
def test_content_is_not_how_a_job_is_named_or_scheduled_or_ordered(changes: dict[str, Any]) -> None:
    assert sha(**changes) == sha()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "y"},
        {"batch_id": "other"},
        {"custom_id": "c"},
        {"tenant": "acme"},
        {"metadata": {"a": "b"}},
        {"model": "m"},
        {"sampling": {"seed": 2, "top_k": 2}},
        {"some_newer_field": 1},
    ],
)
def test_content_is_everything_else(changes: dict[str, Any]) -> None:
    assert sha(**changes) != sha()


def test_content_is_the_same_whether_body_or_header_names_the_batch() -> None:
    by_header = envelope({"prompt": "x"}, [("headrace-batch-id", b"b")])
    assert by_header.content_sha == envelope({"prompt": "x", "batch_id": "b"}).content_sha


def test_content_that_has_no_canonical_form_has_a_digest_all_the_same() -> None:
    value = b'{"prompt": "\\ud800"}'
    first = parse_envelope(value, None, SOURCE)
    assert len(first.content_sha) == 32
    assert first.content_sha == parse_envelope(value, None, Source("t", 0, 2, NOW)).content_sha


@pytest.mark.parametrize(
    ("value", "deadline"),
    [
        ("2027-01-31T12:00:00Z", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("2027-01-31T12:00:00.25-05:30", datetime(2027, 1, 31, 17, 30, 0, 250_000, tzinfo=UTC)),
        (1_800_000_000, datetime(2027, 1, 15, 8, tzinfo=UTC)),
        (1_800_000_000.5, datetime(2027, 1, 15, 8, 0, 0, 500_000, tzinfo=UTC)),
        (datetime(2027, 1, 1, tzinfo=timezone(timedelta(hours=1))), datetime(2026, 12, 31, 23, tzinfo=UTC)),
    ],
)
def test_a_deadline_is_a_time_with_a_zone_or_seconds(value: object, deadline: datetime) -> None:
    assert parse_deadline(value) == deadline
    assert parse_deadline(value).tzinfo is UTC


@pytest.mark.parametrize(
    "value",
    [
        "tomorrow",
        "",
        "2027-01-31T12:00:00",
        "2027-01-31",
        "1800000000",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        3600,
        1_800_000_000_000_000,
        1e300,
        float("nan"),
        float("inf"),
        True,
        [],
        None,
        datetime(2027, 1, 1),
    ],
)
def test_anything_else_is_no_deadline(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_deadline(value)


@given(
    st.binary()
    | st.builds(orjson.dumps, st.dictionaries(st.sampled_from(["job_id", "deadline", "body"]), st.text())),
    st.lists(
        st.tuples(st.sampled_from(["headrace-job-id", "headrace-deadline", "x"]), st.none() | st.binary())
    ),
    st.integers(-1, 2**63 - 1),
)
def test_no_record_crashes_the_reader(
    value: bytes, headers: list[tuple[str, bytes | None]], timestamp_ms: int
) -> None:
    source = Source("t", 0, 1, timestamp_ms)
    try:
        outcome: object = parse_envelope(value, headers, source)
    except Unparsable as error:
        outcome = error
    assert isinstance(outcome, Envelope | Unparsable)
