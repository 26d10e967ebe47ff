"""Workers that join and leave all the time, with work in flight."""

import random

import pytest
from fleet import MakeFleet

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"], indirect=True)
def test_workers_that_join_and_leave_all_the_time_run_nothing_twice(
    make_fleet: MakeFleet, protocol: str
) -> None:
    fleet = make_fleet(group_protocol=protocol, grace_s=60.0)
    fleet.start(workers=2)
    for change in range(14):
        fleet.send(300)
        if len(fleet.workers) < 2 or (change % 2 and len(fleet.workers) < 4):
            fleet.join()
        else:
            fleet.leave(random.choice(fleet.workers))
        fleet.wait_ended(200 * change)
    fleet.settle()
    fleet.assert_books_balance()


def test_workers_that_leave_in_a_hurry_give_back_what_runs(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(engine={"latency_s": 4.0, "slots": 64}, grace_s=0.5)
    fleet.start(workers=2)
    fleet.send(1000)
    for share in (50, 150, 300):
        fleet.wait_ended(share)
        fleet.leave(fleet.workers[0])
        fleet.join()
    fleet.settle()
    given_back = fleet.count("SELECT count(*) - count(DISTINCT id) FROM attempts")
    assert given_back > 0
    fleet.assert_books_balance(run_again=given_back)
    # Whoever leaves in good order makes nobody a suspect, and keeps nobody waiting for its lease to run out.
    assert fleet.count("SELECT count(*) FROM attempts WHERE ended_at IS NULL OR died") == 0
