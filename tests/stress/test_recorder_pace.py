"""The recorder far behind the workers, and far ahead of them."""

import pytest
from fleet import MakeFleet

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

JOBS = 3000


def test_a_recorder_that_comes_when_all_is_done(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=2, recorder=False)
    fleet.send(JOBS)
    fleet.wait(lambda: fleet.ended() == len(fleet.expected), "the workers have ended every job")
    rows = fleet.line.query("SELECT id, state, finished_at FROM jobs ORDER BY id")
    fleet.start(workers=0)
    fleet.settle()
    assert fleet.line.query("SELECT id, state, finished_at FROM jobs ORDER BY id") == rows
    fleet.assert_books_balance()


def test_a_recorder_that_has_written_everything_before_the_first_worker_starts(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=0)
    fleet.send(JOBS)

    def all_is_queued() -> bool:
        batch, all_of_it = fleet.batch(), (len(fleet.expected), len(fleet.rubbish))
        return batch is not None and (batch.queued, batch.rejected) == all_of_it

    fleet.wait(all_is_queued, "every job is queued")
    fleet.start(workers=2, recorder=False)
    fleet.settle()
    fleet.assert_books_balance()
