"""Processes killed with kill -9, again and again, in mid-work."""

import random
import time

import pytest
from fleet import BATCH, MakeFleet

from headrace.schemas import CancelBatch

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

JOBS = 4000


@pytest.mark.parametrize("protocol", ["classic", "consumer"], indirect=True)
def test_workers_killed_every_few_seconds(make_fleet: MakeFleet, protocol: str) -> None:
    fleet = make_fleet(group_protocol=protocol)
    fleet.start(workers=2)
    fleet.send(JOBS)
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        fleet.wait_ended(int(share * JOBS))
        time.sleep(random.uniform(0.0, 1.0))  # at no particular moment
        fleet.kill(random.choice(fleet.workers))
    fleet.settle()
    fleet.assert_books_balance()


def test_a_recorder_killed_every_few_seconds(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    for _ in range(6):
        fleet.send(JOBS // 6)
        time.sleep(random.uniform(0.0, 2.0))
        assert fleet.recorder is not None
        fleet.kill(fleet.recorder)
    fleet.settle()
    fleet.assert_books_balance()


def test_everything_killed_at_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    fleet.send(JOBS)
    for share in (0.2, 0.4, 0.6):
        fleet.wait_ended(int(share * JOBS))
        fleet.kill(*fleet.processes)
    fleet.settle()
    fleet.assert_books_balance()


def test_a_batch_that_is_cancelled_while_workers_are_killed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    fleet.send(JOBS)
    fleet.wait_ended(JOBS // 10)
    fleet.line.control(CancelBatch(batch_id=BATCH))
    fleet.kill(random.choice(fleet.workers))
    fleet.line.control(CancelBatch(batch_id=BATCH))  # a repeat does no harm
    fleet.settle()
    ended = dict(fleet.line.query("SELECT custom_id, state::text FROM job_status"))
    cancelled = {custom_id for custom_id, state in ended.items() if state == "cancelled"}
    assert len(cancelled) > JOBS // 2
    fleet.expected |= dict.fromkeys(cancelled, "cancelled")
    fleet.assert_books_balance()
