"""The wire and the engine know nothing of each other, and allow the same, in the same words."""

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.engine import edits, grammar, intake, validation
from headrace.engine.errors import InvalidRequest
from headrace.engine.validation import REQUEST_RULES, SAMPLING_RULES, Rule
from headrace.schemas import answer_form, looks, sampling
from headrace.schemas.sampling import Sampling

RULES = {
    rule.param: rule for rule in (*SAMPLING_RULES, *REQUEST_RULES) if rule.param in Sampling.model_fields
}
VALUES: list[Any] = [
    *(sign * edge + step for edge in (0, 1, 2, 10, 20, 128, 2**31, 2**63, 2**64) for step in (-1, 0, 1) for sign in (-1, 1)),
    *(number + step for number in (-2.0, 0.0, 1.0, 2.0, 10.0) for step in (-1e-6, 0.0, 1e-6)),
    float("nan"), float("inf"), "1", [1], True,
]  # fmt: skip
# The wire's -1 of top_k is the engine's 0, and its logprobs may be true or false.
ONLY_ON_THE_WIRE = [("top_k", -1, int), ("logprobs", True, bool)]


@pytest.mark.parametrize(
    ("wire", "engine"),
    [
        (sampling.MAX_STOPS, validation.MAX_STOPS),
        (sampling.MAX_STOP_CHARS, validation.MAX_STOP_CHARS),
        (sampling.MAX_STOP_TOKEN_IDS, validation.MAX_STOP_TOKEN_IDS),
        (sampling.MAX_BAD_WORDS, validation.MAX_BAD_WORDS),
        (sampling.MAX_CHOICES, validation.MAX_CHOICES),
        (sampling.MAX_LISTED, edits.MAX_LISTED),
        (sampling.MAX_LOGPROBS, intake.MAX_LOGPROBS),
        (looks.MAX_CONTINUATIONS, validation.MAX_CONTINUATIONS),
        (looks.MAX_INPUTS, validation.MAX_INPUTS),
        (answer_form.MAX_FORM_CHARS, grammar.MAX_GRAMMAR_CHARS),
    ],
)
def test_a_limit_is_the_same_on_both_sides(wire: int, engine: int) -> None:
    assert wire == engine


def taken_by_the_wire(option: str, value: Any) -> bool:
    try:
        Sampling.model_validate({option: value})
    except ValidationError:
        return False
    return True


def taken_by_the_engine(rule: Rule, value: Any) -> bool:
    try:
        rule.check(value)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("option", RULES)
def test_what_the_wire_takes_the_engine_takes_and_nothing_else(option: str) -> None:
    for value in VALUES:
        if (option, value, type(value)) not in ONLY_ON_THE_WIRE:
            assert taken_by_the_wire(option, value) == taken_by_the_engine(RULES[option], value), value


@pytest.mark.parametrize("option", RULES)
def test_both_say_what_is_allowed_in_the_same_words(option: str) -> None:
    said = Sampling.model_fields[option].description or ""
    for word in RULES[option].allowed.split("; "):
        assert word.removesuffix(" keeps all tokens") in said
