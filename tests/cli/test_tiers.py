"""From the environment to tiers and priorities; a mistake names the variable and what is wrong with it."""

import math

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.tiers import priorities, tiers
from headrace.engine.priorities import Priority
from headrace.settings import Settings
from headrace.worker import default_tiers


def test_nothing_set_means_the_defaults() -> None:
    assert tiers(Settings()) == default_tiers(("interactive", "standard", "bulk"))


def test_what_is_set_takes_the_default_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob, value in {
        "WEIGHT": "2.5", "FLOOR": "0.1", "PROMOTE_AFTER_SECONDS": "inf", "RESERVE": "0.25", "PREEMPTS": "no",
        "MAX_PREEMPTIONS": "1", "TENANT_LIMIT": "16", "PREFETCH": "64",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"HEADRACE_TIER__STANDARD__{knob}", value)
    monkeypatch.setenv("HEADRACE_PREFETCH", "100")
    interactive, standard, bulk = tiers(Settings())
    assert (standard.weight, standard.floor, standard.promote_after_s) == (2.5, 0.1, math.inf)
    assert (standard.reserve, standard.preempts, standard.max_preemptions) == (0.25, False, 1)
    assert (standard.tenant_limit, standard.prefetch) == (16, 64)
    assert (interactive.prefetch, bulk.prefetch) == (100, 100)
    assert priorities([interactive, standard, bulk]) == (
        Priority(reserve=0.02, preempts=True, max_preemptions=3),
        Priority(reserve=0.25, preempts=False, max_preemptions=1),
        Priority(reserve=0.0, preempts=True, max_preemptions=3),
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADRACE_TIER__BULK__FLOOR", "1.5", "HEADRACE_TIER__BULK__FLOOR is not usable"),
        ("HEADRACE_TIER__BULK__FLOR", "0.1", "HEADRACE_TIER__BULK__FLOR is no knob of a tier"),
        ("HEADRACE_TIER__BULC__FLOOR", "0.1", "HEADRACE_TIER__BULC__... is about no tier"),
        ("HEADRACE_TIER__BULK__RESERVE", "0.99", "the tiers' reserves must add up to less than 1"),
        ("HEADRACE_TIER__BULK__FLOOR", "0.95", "the tiers' floors must add up to 1 at most"),
        ("HEADRACE_TIER", '{"bulk"', "HEADRACE_TIER is not usable: it must be a JSON object"),
    ],
)
def test_a_mistake_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["worker"])
    assert result.exit_code == Exit.USAGE
    assert said in " ".join(result.stderr.split())


FLOORS = "Lower HEADRACE_TIER__INTERACTIVE__FLOOR or HEADRACE_TIER__STANDARD__FLOOR or HEADRACE_TIER__NIGHT_RUN__FLOOR."
RESERVES = "HEADRACE_TIER__INTERACTIVE__RESERVE or HEADRACE_TIER__NIGHT_RUN__RESERVE"


@pytest.mark.parametrize(
    ("variables", "said", "remedy"),
    [
        ({"NIGHT_RUN__FLOOR": "0.95"}, "0.05 of interactive, 0.05 of standard, 0.95 of night-run", FLOORS),
        ({"NIGHT_RUN__RESERVE": "0.98"}, "0.02 of interactive, 0.98 of night-run", f"Lower {RESERVES}."),
        (
            {"NIGHT_RUN__RESERVE": "0.1"},
            "all 2 places in flight (0.02 of interactive, 0.1 of night-run; one place each at least)",
            f"Raise HEADRACE_MAX_IN_FLIGHT, lower {RESERVES}, or set one to 0.",
        ),
    ],
)
def test_tiers_that_promise_too_much_are_named_with_the_variables_that_mend_it(
    variables: dict[str, str], said: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TIERS", "interactive,standard,night-run")
    monkeypatch.setenv("HEADRACE_MAX_IN_FLIGHT", "2")
    for name, value in variables.items():
        monkeypatch.setenv(f"HEADRACE_TIER__{name}", value)
    with pytest.raises(Failure) as caught:
        tiers(Settings())
    assert caught.value.exit_code is Exit.USAGE
    assert said in caught.value.message
    assert caught.value.remedy == remedy
