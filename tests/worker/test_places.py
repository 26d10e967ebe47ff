"""How many jobs an engine is given, by what it was seen to run at once."""

import pytest

from headrace.worker.places import REMEMBERED_S, WAITING, Places


def test_an_engine_that_runs_more_is_given_more_until_it_has_as_many_as_it_may() -> None:
    places, running, given = Places(2304), 0, []
    for now in range(12):
        given.append(places.at(float(now), running))
        running = min(given[-1], 2048)
    assert given == [*range(WAITING, 2304, WAITING), 2304, 2304, 2304, 2304]


def test_an_engine_that_cannot_run_many_has_few_waiting_however_many_slots_it_has() -> None:
    places, running = Places(2304), 0
    for now in range(12):
        running = min(places.at(float(now), running), 130)
    assert places.at(12.0, running) == 130 + WAITING


@pytest.mark.parametrize(
    ("later", "expected"), [(REMEMBERED_S, 1000 + WAITING), (REMEMBERED_S + 1, 10 + WAITING)]
)
def test_a_lull_is_forgotten_only_after_a_while(later: float, expected: int) -> None:
    places = Places(2304)
    places.at(0.0, 1000)
    assert places.at(later, 10) == expected
