"""From a pipeline's line to a record: names, checks, and nothing changed."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from headrace.client.errors import InvalidLine
from headrace.client.lines import Line, LineReader, Outgoing, to_bytes
from headrace.schemas import Envelope, ErrorCode, PromptJob, Source, parse_envelope, parse_job, topics, uuid7
from headrace.schemas.ids import time_ms

SOURCE = Source("t", 0, 7, timestamp_ms=int(datetime.now(UTC).timestamp() * 1000))


def read(*lines: Line, **options: object) -> list[Outgoing]:
    reader = LineReader("default", "b", **options)  # type: ignore[arg-type]
    return [reader.read(line, number) for number, line in enumerate(lines, start=1)]


def envelope(outgoing: Outgoing) -> Envelope:
    return parse_envelope(outgoing.value, outgoing.headers, SOURCE)


def test_a_line_goes_out_byte_for_byte() -> None:
    odd = b'{ "prompt" : "a\\u0000b",  "prompt": "\xf0\x9f\x90\x9f", "x": 1e2 }'
    assert to_bytes(odd + b"\r\n") == odd
    assert to_bytes(odd.decode() + "\n") == odd
    assert to_bytes(b"\xff\xfe".decode("utf-8", "surrogateescape")) == b"\xff\xfe"


def test_a_dict_keeps_what_its_error_is_about() -> None:
    value = to_bytes({"prompt": "\ud800", "sampling": {"temperature": float("nan")}})
    assert value == b'{"prompt":"\\ud800","sampling":{"temperature":NaN}}'


def test_a_dict_takes_no_more_room_than_its_text() -> None:
    assert to_bytes({"prompt": "\u4e2d\u6587\0"}) == '{"prompt":"\u4e2d\u6587\\u0000"}'.encode()


def test_a_dict_may_hold_times_and_uuids_and_nothing_stranger() -> None:
    id = uuid7()
    deadline = datetime(2030, 1, 1, tzinfo=UTC)
    job = parse_job(to_bytes({"prompt": "a", "job_id": id, "deadline": deadline}), None, SOURCE)
    assert (job.job_id, job.deadline) == (str(id), deadline)
    with pytest.raises(TypeError, match="object has no form in JSON"):
        to_bytes({"prompt": object()})


def test_a_line_without_a_job_id_gets_a_fresh_uuid7() -> None:
    first, second = read({"prompt": "a"}, {"prompt": "a"})
    assert first.id != second.id
    for outgoing in (first, second):
        assert outgoing.problem is None
        assert outgoing.id == envelope(outgoing).id == UUID(outgoing.key.decode())
        assert time_ms(outgoing.id) == pytest.approx(SOURCE.timestamp_ms, abs=600_000)


@pytest.mark.parametrize("named", [{"job_id": "mine"}, {"idempotency_key": "mine"}, {"job_id": str(uuid7())}])
def test_a_line_that_names_itself_keeps_its_name(named: dict[str, str]) -> None:
    (outgoing,) = read({"prompt": "a", **named})
    assert outgoing.id == parse_envelope(to_bytes({"prompt": "a", **named}), None, SOURCE).id
    assert envelope(outgoing).id == outgoing.id


def test_a_prompt_job_reads_as_itself() -> None:
    job = PromptJob(prompt="nul \0 inside", custom_id="c", metadata={"a": "b"})
    (outgoing,) = read(job)
    parsed = parse_job(outgoing.value, outgoing.headers, SOURCE)
    assert parsed.prompt == "nul \0 inside"
    assert parsed.custom_id == "c"
    assert parsed.metadata == {"a": "b"}


@pytest.mark.parametrize("job_id", [7, "", "x" * 300])
def test_a_line_whose_job_id_is_no_name_is_sent_without_an_id(job_id: object) -> None:
    (outgoing,) = read({"prompt": "a", "job_id": job_id})
    assert outgoing.id is None
    assert outgoing.problem is not None
    assert (outgoing.problem.param, outgoing.problem.sent) == ("job_id", True)


def test_a_bad_job_fails_under_the_id_that_the_client_gave_it() -> None:
    (outgoing,) = read({"prompt": "a", "sampling": {"min_p": 2}})
    assert outgoing.problem is not None
    assert (outgoing.problem.code, outgoing.problem.param) == (ErrorCode.INVALID_VALUE, "sampling.min_p")
    assert str(outgoing.problem).startswith("line 1: sampling.min_p must be")
    assert envelope(outgoing).id == outgoing.id


def test_a_job_sent_twice_counts_once() -> None:
    lines = ({"job_id": "a", "prompt": "x"}, {"job_id": "a", "prompt": "x"}, {"job_id": "a", "prompt": "y"})
    _, same, other = read(*lines)
    assert same.problem is not None
    assert (same.problem.code, same.problem.sent) == (ErrorCode.DUPLICATE_JOB_ID, False)
    assert not same.problem.left_out
    assert other.problem is not None
    assert (other.problem.code, other.problem.sent) == (ErrorCode.DUPLICATE_JOB_ID, True)
    assert other.problem.message == "its job_id is that of line 1, with other content"


@pytest.mark.parametrize(("key", "fresh"), [(None, [False, True, True]), ("k", [False, False, False])])
def test_a_line_that_nothing_names_has_a_fresh_id(key: str | None, fresh: list[bool]) -> None:
    reader = LineReader("default", "b", key)
    lines: tuple[Line, ...] = (
        {"job_id": str(uuid7()), "prompt": "x"},
        {"custom_id": "a", "prompt": "x"},
        {"prompt": 1},
    )
    for number, line in enumerate(lines, start=1):
        reader.read(line, number)
    assert [line.fresh for line in reader.first_of.values()] == fresh


@pytest.mark.parametrize("field", ["batch_id", "tenant"])
def test_a_line_of_another_batch_or_tenant_is_not_sent(field: str) -> None:
    (outgoing,) = read({"prompt": "x", field: "other"})
    assert outgoing.problem is not None
    assert (outgoing.problem.param, outgoing.problem.sent) == (field, False)
    assert outgoing.problem.left_out


def test_a_line_larger_than_kafka_takes_is_not_sent() -> None:
    (outgoing,) = read({"prompt": "x" * 100}, max_bytes=100)
    assert outgoing.problem is not None
    assert (outgoing.problem.code, outgoing.problem.sent) == (ErrorCode.MESSAGE_TOO_LARGE, False)
    assert outgoing.problem.left_out
    assert "HEADRACE_KAFKA_MESSAGE_MAX_BYTES" in outgoing.problem.message


def test_a_deadline_of_the_batch_is_for_jobs_without_one() -> None:
    later, sooner = (datetime.now(UTC) + timedelta(hours=hours) for hours in (2, 1))
    outgoing = read({"prompt": "a"}, {"prompt": "b", "deadline": sooner}, deadline=later)
    assert [envelope(one).deadline for one in outgoing] == [later, sooner]


def test_an_idempotency_key_names_jobs_by_custom_id_then_by_line() -> None:
    lines = ({"custom_id": "a", "prompt": "x"}, {"custom_id": "a", "prompt": "y"}, {"prompt": "z"})
    names = [envelope(outgoing).job_id for outgoing in read(*lines, idempotency_key="k")]
    assert [name.partition(":")[2] for name in names if name] == ["1:a", "2:a", "1:line 3"]
    assert [one.id for one in read(*lines, idempotency_key="k")] == [
        one.id for one in read(*lines, idempotency_key="k")
    ]
    assert not {one.id for one in read(*lines, idempotency_key="k")} & {
        one.id for one in read(*lines, idempotency_key="l")
    }


def test_a_long_idempotency_key_still_names_jobs() -> None:
    lines = [{"custom_id": "c" * 250 + str(number), "prompt": "x"} for number in range(2)]
    first, second = read(*lines, idempotency_key="k" * 200)
    assert first.id == envelope(first).id != second.id
    assert read(*lines, idempotency_key="k" * 200)[1].id == second.id


def test_a_line_that_nobody_can_read_goes_with_its_number_for_a_custom_id() -> None:
    good, bad = read({"prompt": "x"}, b"not json")
    assert topics.CUSTOM_ID not in dict(good.headers)
    assert dict(bad.headers)[topics.CUSTOM_ID] == b"line 2"


def test_lines_with_the_custom_id_of_another_are_counted_and_the_first_are_named() -> None:
    reader = LineReader("t", "b")
    lines: list[Line] = [{"prompt": "none"}, {"prompt": "none"}, {"custom_id": "once", "prompt": "x"}]
    lines += [{"custom_id": name, "prompt": "x"} for name in "abcdefg" * 2]
    for number, line in enumerate(lines, start=1):
        reader.read(line, number)
    assert (reader.repeated.count, reader.repeated.first_lines) == (7, [11, 12, 13, 14, 15])


def test_a_second_copy_that_is_not_sent_is_not_counted_as_one_more_of_its_custom_id() -> None:
    reader = LineReader("t", "b")
    for number in (1, 2):
        reader.read({"job_id": "a", "custom_id": "a", "prompt": "x"}, number)
    assert reader.repeated.count == 0


def test_a_field_that_no_job_has_is_named_and_the_line_sent_as_it_is() -> None:
    reader = LineReader("default", "b")
    first = reader.read({"prompt": "x", "sampling": {"temprature": 0}}, 1)
    reader.read(b'{"promt": "x"}', 2)
    assert (first.problem, first.value) == (None, b'{"prompt":"x","sampling":{"temprature":0}}')
    assert [(field.path, field.meant, field.line) for field in reader.unknown.found] == [
        ("sampling.temprature", "sampling.temperature", 1),
        ("promt", "prompt", 2),
    ]


def test_a_job_that_has_no_form_in_json_is_named() -> None:
    circular: dict[str, object] = {}
    circular["prompt"] = circular
    for job in ({"prompt": {1, 2}}, circular, '{"prompt": "\ud800"}'):
        with pytest.raises(InvalidLine, match="line 2: the job cannot be written as JSON: "):
            read({"prompt": "a"}, job)


def test_an_idempotency_key_names_lines_that_nobody_can_read_too() -> None:
    def names(**options: object) -> list[bytes | None]:
        return [dict(one.headers).get(topics.JOB_ID) for one in read(b"not json", b"not json", **options)]

    first, second = names(idempotency_key="k")
    assert first is not None
    assert first != second
    assert names(idempotency_key="k") == [first, second]
    assert names() == [None, None]
