"""A record that was sent again is read as if it lay where the first one lay."""

import pytest

from headrace.schemas import Source, dead_letter_source, parse_envelope, repeat_headers, source_of, topics

FIRST = Source("t", 3, 17, 1_795_000_000_000)


def test_a_repeat_is_the_same_job_and_asks_for_its_next_run() -> None:
    value, headers = b'{"prompt": "x"}', [(topics.BATCH_ID, b"b")]
    again = repeat_headers(headers, Source("t", 3, 17, 1_795_000_000_000, run=2))
    source = source_of(again, "t", 5, 99, 1_795_000_999_000)
    assert source == Source("t", 3, 17, 1_795_000_000_000, run=2)
    assert parse_envelope(value, again, source) == parse_envelope(value, headers, FIRST)


def test_a_repeat_of_a_repeat_names_the_first_record() -> None:
    once = repeat_headers([], Source("t", 3, 17, 5, run=2))
    twice = repeat_headers(once, Source("t", 3, 17, 5, run=3))
    assert twice == [(topics.RUN, b"3"), (topics.REPLAY_OF, b"3/17/5")]


@pytest.mark.parametrize(
    ("run", "place"),
    [
        (b"1", b"3/17/5"),
        (b"-2", b"3/17/5"),
        (b"2", b"3/17"),
        (b"2", b"a/b/c"),
        (b"2", None),
        (b"2", b"3/9999999999999999999/5"),
        (b"2", b"4294967296/17/5"),
        (b"99999999999", b"3/17/5"),
        ("٢".encode(), b"3/17/5"),
    ],
)
def test_headers_that_make_no_sense_are_as_if_not_there(run: bytes, place: bytes | None) -> None:
    assert source_of([(topics.RUN, run), (topics.REPLAY_OF, place)], "t", 5, 99, 7) == Source("t", 5, 99, 7)


def test_a_dead_letter_says_where_its_record_lay() -> None:
    headers = [
        (topics.DEAD_TOPIC, b"t"),
        (topics.DEAD_PARTITION, b"3"),
        (topics.DEAD_OFFSET, b"17"),
        (topics.DEAD_TIMESTAMP, b"5"),
    ]
    assert dead_letter_source(headers) == Source("t", 3, 17, 5)
    assert dead_letter_source([*headers, (topics.DEAD_RUN, b"4")]) == Source("t", 3, 17, 5, run=4)
    assert dead_letter_source(headers[1:]) is None
    assert repeat_headers(headers, Source("t", 3, 17, 5, run=2)) == [
        (topics.RUN, b"2"),
        (topics.REPLAY_OF, b"3/17/5"),
    ]
