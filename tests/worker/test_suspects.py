"""A job that kills engines is found by halving groups of suspects, and only deaths alone count against a job."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger import StoredJob
from headrace.schemas import uuid7
from headrace.worker.suspects import LARGEST_GROUP, Suspects, is_guilty, runs_apart


@pytest.mark.parametrize(("suspicions", "apart"), [(0, False), (1, False), (2, True)])
def test_one_suspicion_costs_no_detour(suspicions: int, apart: bool) -> None:
    assert runs_apart(StoredJob(uuid7(), suspect=suspicions)) is apart


@pytest.mark.parametrize(("deaths_alone", "guilty"), [(0, False), (1, False), (2, True)])
def test_only_deaths_alone_count_against_a_job(deaths_alone: int, guilty: bool) -> None:
    assert is_guilty(StoredJob(uuid7(), suspect=40, deaths_alone=deaths_alone)) is guilty


def hunt(innocent: int, guilty: int) -> tuple[int, int]:
    """Run a crowd until all are cleared or found; deaths of engines, and innocents that were found guilty."""
    jobs = [
        SimpleNamespace(kills=n < guilty, waiting=True, group_size=0, alone=0)
        for n in range(innocent + guilty)
    ]
    suspects = Suspects()
    for job in jobs:
        suspects.put(job, 0)  # type: ignore[arg-type]
    deaths = wronged = 0
    while suspects:
        group = suspects.next_group()
        if not any(job.kills for job in group):  # type: ignore[attr-defined]
            continue
        deaths += 1
        for job in group:
            job.alone += len(group) == 1  # type: ignore[attr-defined]
            if job.alone < 2:  # type: ignore[attr-defined]
                suspects.put(job, len(group))
            else:
                wronged += not job.kills  # type: ignore[attr-defined]
    return deaths, wronged


def test_a_killer_among_many_is_found_in_a_few_deaths() -> None:
    deaths, wronged = hunt(innocent=1000, guilty=1)
    assert wronged == 0
    assert deaths <= LARGEST_GROUP.bit_length() + 1


@given(st.integers(0, 200), st.integers(0, 5))
def test_the_innocent_are_never_found_guilty(innocent: int, guilty: int) -> None:
    deaths, wronged = hunt(innocent, guilty)
    assert wronged == 0
    assert deaths <= guilty * (LARGEST_GROUP.bit_length() + 1)


def test_who_must_not_run_any_more_is_not_in_a_group() -> None:
    suspects = Suspects()
    suspects.put(SimpleNamespace(waiting=False), 0)  # type: ignore[arg-type]
    assert suspects.next_group() == []
    assert not suspects
