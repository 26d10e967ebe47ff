"""Fields that no job has: named once each, with what may have been meant, and free-form places left alone."""

from typing import Any

import pytest

from headrace.schemas.unknown_fields import MOST_NAMED, UnknownFields

CHAT: dict[str, Any] = {
    "custom_id": "c",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}


def told(*lines: dict[str, Any]) -> list[str]:
    unknown = UnknownFields()
    for number, line in enumerate(lines, start=1):
        unknown.note(line, number)
    return [str(field) for field in unknown.found]


def test_a_field_is_named_once_with_the_number_of_lines_that_have_it() -> None:
    wrong = {"prompt": "x", "sampling": {"temprature": 0}}
    named = (
        "line 2: sampling.temprature is no field of a job and is ignored; did you mean sampling.temperature?"
    )
    assert told({"prompt": "x"}, wrong) == [named]
    assert told({"prompt": "x"}, wrong, wrong) == [f"{named} (and 1 more line)"]
    assert told({"prompt": "x"}, *[wrong] * 1500) == [f"{named} (and 1,499 more lines)"]


@pytest.mark.parametrize(
    ("line", "path", "meant"),
    [
        ({"promt": "x"}, "promt", "prompt"),
        ({"prompt": "x", "temprature": 0}, "temprature", "sampling.temperature"),
        ({"prompt": "x", "sampling": {"maxTokens": 1}}, "sampling.maxTokens", "sampling.max_tokens"),
        ({"inputs": ["x"], "embedding": {"poling": "cls"}}, "embedding.poling", "embedding.pooling"),
        ({"prompt": "x", "zzz": 1}, "zzz", None),
        (CHAT | {"body": CHAT["body"] | {"max_token": 1}}, "body.max_token", "body.max_tokens"),
        (CHAT | {"temprature": 1}, "temprature", "body.temperature"),
        (CHAT | {"deadlin": 1}, "deadlin", "deadline"),
    ],
)
def test_a_field_is_named_with_the_known_one_most_like_it(
    line: dict[str, Any], path: str, meant: str | None
) -> None:
    unknown = UnknownFields()
    assert unknown.note(line, 7) == unknown.found
    assert [(field.path, field.meant, field.line) for field in unknown.found] == [(path, meant, 7)]
    assert unknown.note(line, 8) == []


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "x", "metadata": {"temprature": "0"}, "chat_template_kwargs": {"enable_thinkin": True}},
        {"prompt": "x", "sampling": {"logit_bias": {"7": 1}}, "guided_json": {"typ": "object"}},
        {"messages": [{"role": "user", "content": "x", "nam": "y"}], "tools": [{"paramters": {"typ": 1}}]},
        {"prompt": "x", "temprature": None, "sampling": None},
        {"prompt": "x", "best_of": 1, "sampling": {"use_beam_search": False, "prompt": "y"}, "temperature": 0},
        {"prompt": "x", "sampling": 7, "embedding": [1]},
        CHAT | {"body": CHAT["body"] | {"user": "u", "store": True, "service_tier": "auto", "metadata": {"a": "b"}}},
        CHAT | {"body": "no object"},
        CHAT | {"tenant": "t", "requires": [], "temperature": 0},
    ],
)  # fmt: skip
def test_what_is_free_or_null_or_refused_or_harmless_is_not_named(line: dict[str, Any]) -> None:
    assert told(line) == []


def test_of_a_name_that_is_no_text_or_has_no_end_what_can_be_shown_is_named() -> None:
    assert told({"a\ud800": 1, "b" * 999: 1}) == [
        "line 1: a\ufffd is no field of a job and is ignored",
        f"line 1: {'b' * 64} is no field of a job and is ignored",
    ]


def test_a_file_with_another_field_in_each_line_takes_no_more_memory_for_it() -> None:
    assert len(told(*({"prompt": "x", f"{number}": 1} for number in range(2 * MOST_NAMED)))) == MOST_NAMED
