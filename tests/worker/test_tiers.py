"""Tiers as values: defaults for any names, shares that keep every floor, mistakes that name the field."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.errors import Overpromised
from headrace.worker.tiers import Tier, check_together, default_tiers, shares


def test_the_default_tiers_are_made_for_any_names() -> None:
    assert default_tiers(("only",)) == (Tier("only", weight=1.0, floor=0.05),)
    high, low = default_tiers(("x", "y"))
    assert (high.name, low.name) == ("x", "y")
    assert high.weight > low.weight
    assert (high.promote_after_s, low.promote_after_s) == (math.inf, 600.0)
    assert (high.reserve, low.reserve) == (0.02, 0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 12, 40])
def test_default_tiers_can_be_promised_together(count: int) -> None:
    tiers = default_tiers([f"t{n}" for n in range(count)])
    check_together(tiers, 256)
    assert sum(shares(tiers)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0.0), ("weight", -1.0), ("weight", math.inf), ("weight", math.nan), ("floor", -0.1), ("floor", 1.0),
        ("promote_after_s", 0.0), ("reserve", -0.1), ("reserve", 1.0), ("max_preemptions", -1), ("tenant_limit", 0),
        ("prefetch", 0),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"tier bulk: {field} must .*{value}"):
        replace(Tier("bulk"), **{field: value})


def test_promises_that_cannot_be_kept_together_are_refused() -> None:
    with pytest.raises(Overpromised, match=r"floors must .* 0.6 of a, 0.6 of b"):
        check_together([Tier("a", floor=0.6), Tier("b", floor=0.6), Tier("c")], 256)
    with pytest.raises(Overpromised, match=r"reserves must .* 0.5 of a, 0.5 of b"):
        check_together([Tier("a", reserve=0.5), Tier("b", reserve=0.5), Tier("c")], 256)
    with pytest.raises(Overpromised, match=r"all 2 places in flight \(0.1 of a, 0.1 of b"):
        check_together([Tier("a", reserve=0.1), Tier("b", reserve=0.1), Tier("c")], 2)


def test_a_tier_holds_four_times_as_many_records_as_may_be_in_flight_unless_told() -> None:
    assert Tier("a").holds(2304) == 9216
    assert Tier("a", prefetch=64).holds(2304) == 64


def test_a_reserve_is_one_place_at_least_where_there_are_two_and_never_all() -> None:
    assert [Tier("a", reserve=0.02).places(total) for total in (1, 2, 100, 256)] == [0, 1, 2, 5]
    assert Tier("a").places(256) == 0


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 1.0)), min_size=1, max_size=6))
def test_shares_add_up_and_none_is_below_its_floor(drawn: list[tuple[float, float]]) -> None:
    total = sum(floor for _, floor in drawn)
    tiers = [Tier(f"t{i}", weight, 0.99 * floor / max(total, 1.0)) for i, (weight, floor) in enumerate(drawn)]
    parts = shares(tiers)
    assert sum(parts) == pytest.approx(1.0)
    assert all(part >= tier.floor for tier, part in zip(tiers, parts, strict=True))


def test_a_floor_that_takes_from_the_others_takes_none_below_its_own() -> None:
    tiers = [Tier("a", 50.0), Tier("b", 49.0, floor=0.45), Tier("c", 1.0, floor=0.2)]
    assert shares(tiers) == pytest.approx([0.35, 0.45, 0.2])
