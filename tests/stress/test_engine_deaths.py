"""Engines die, and workers with them: a job that kills them is found, and its neighbours are not charged."""

import pytest
from fleet import Fleet, MakeFleet

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

STANDARD = {"tier": "standard", "partition": 1}
FOUND = "SELECT count(*) FROM jobs WHERE error_code = 'engine_failure'"
# Two deaths make it a suspect, six halve a group of 64 down to one, two more while it is alone convict it.
DEATHS_TO_FIND_ONE = 2 + 6 + 2


def assert_only_the_killers_were_charged(fleet: Fleet, killers: int) -> None:
    fleet.assert_books_balance()  # which jobs may fail, and whose records are dead letters
    assert fleet.count(FOUND) == killers


def test_a_job_that_kills_every_engine_is_found_in_a_few_deaths(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    fleet.send(1000)
    fleet.submit("die", STANDARD)
    fleet.send(1000)
    fleet.settle()
    assert_only_the_killers_were_charged(fleet, killers=1)
    deaths = "SELECT count(*) FROM attempts JOIN jobs USING (id) WHERE error_code = 'engine_failure'"
    assert fleet.count(deaths) <= DEATHS_TO_FIND_ONE


def test_a_job_that_kills_every_worker_is_found_in_a_few_deaths(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    fleet.send(500)
    fleet.submit("die-whole", STANDARD)
    fleet.send(500)
    fleet.supervised = True
    fleet.wait(lambda: fleet.count(FOUND), "the killer is found")
    fleet.settle()
    assert_only_the_killers_were_charged(fleet, killers=1)
    assert 2 <= fleet.deaths <= DEATHS_TO_FIND_ONE


def test_a_worker_killed_with_a_thousand_jobs_in_flight_costs_no_detour(make_fleet: MakeFleet) -> None:
    # Next to none of them is answered before all are there, however long that takes.
    fleet = make_fleet(engine={"latency_s": 1000.0, "slots": 1000}, max_in_flight=1010)
    fleet.start(workers=1)
    fleet.send(1200)
    in_flight = "SELECT count(*) FROM attempts WHERE ended_at IS NULL"
    fleet.wait(lambda: fleet.count(in_flight) >= 900, "nearly a thousand jobs are in flight")
    fleet.engine = {"latency_s": 0.5, "slots": 1000}
    fleet.kill(*fleet.workers)
    fleet.join()
    fleet.settle()
    fleet.assert_books_balance()
    assert fleet.line.query("SELECT max(attempt) FROM jobs") == [(2,)]
    assert fleet.count("SELECT count(*) FROM attempts WHERE group_size > 0") == 0
