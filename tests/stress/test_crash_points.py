"""A process that dies at one step of the protocol, each step by itself."""

import signal
from pathlib import Path
from uuid import UUID

import crash_points
import pytest
from fleet import BATCH, PATIENCE_S, Fleet, MakeFleet, Process

from headrace.schemas import JobResult, Source
from headrace.schemas.replay import repeat_headers
from headrace.store import open_store

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

JOBS = 2000
REOPENED = "after a job was opened again"
ELSEWHERE = (REOPENED, crash_points.ASLEEP, "after the recorder's write")
OF_A_WORKER = [point for point in crash_points.POINTS if point not in ELSEWHERE]


@pytest.mark.parametrize("point", OF_A_WORKER, ids=lambda point: point.replace(" ", "-").replace(",", ""))
def test_a_worker_that_dies_at_one_step(make_fleet: MakeFleet, tmp_path: Path, point: str) -> None:
    keeps_results_apart = "large" in point
    fleet = make_fleet(
        **{"max_result_bytes": 1, "result_store": str(tmp_path)} if keeps_results_apart else {}
    )
    fleet.start(workers=0)
    doomed = fleet.start_worker(crash=point)
    fleet.send(JOBS)
    begun = "SELECT count(*) FROM attempts"
    fleet.wait(
        lambda: fleet.count(begun) > 0 or doomed.poll(), "the doomed worker runs something, or has died"
    )
    fleet.join()  # takes partitions from the doomed one
    fleet.join()
    assert_died(doomed)
    fleet.settle()
    fleet.assert_books_balance()
    if keeps_results_apart:
        assert_every_result_is_where_its_row_says(fleet, tmp_path)


def assert_died(doomed: Process) -> None:
    """It came to the step at which it had to die."""
    assert doomed.wait(PATIENCE_S) == -signal.SIGKILL


def assert_every_result_is_where_its_row_says(fleet: Fleet, directory: Path) -> None:
    store = open_store(str(directory))
    rows = fleet.line.query("SELECT id, uri, bytes, encode(sha256, 'hex') FROM results")
    assert len(rows) == len(fleet.expected)
    for id, *reference in rows:
        assert JobResult.decode(store.read(*reference)).id == id


def test_a_recorder_that_dies_between_its_write_and_its_commit(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    doomed = fleet.start_recorder(crash="after the recorder's write")
    fleet.send(JOBS)
    assert_died(doomed)
    fleet.start(workers=2)
    fleet.settle()
    fleet.assert_books_balance()


def test_a_worker_that_dies_after_it_opened_a_job_again(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start(workers=1)
    fleet.send(JOBS)
    fleet.finish()
    fleet.leave(fleet.workers[0])
    doomed = fleet.start_worker(crash=REOPENED)
    id = send_a_failed_job_again(fleet)
    assert_died(doomed)

    fleet.join()
    fleet.wait(
        lambda: fleet.count("SELECT count(*) FROM results WHERE id = %s", id) == 2, "its second run ends"
    )
    fleet.settle()
    fleet.assert_books_balance()
    assert fleet.line.query("SELECT run, state FROM jobs WHERE id = %s", id) == [(2, 3)]


def send_a_failed_job_again(fleet: Fleet) -> UUID:
    """What `headrace retry` does for one job, but for opening it in the table."""
    line = fleet.line
    ((id, tier, partition, offset),) = line.query(
        "SELECT id, tier, src_partition, src_offset FROM jobs WHERE state = 3 AND batch_id = %s LIMIT 1",
        BATCH,
    )
    topic, place = line.topics.jobs(tier), (partition, offset)
    (record,) = [m for m in line.everything(topic) if (m.partition(), m.offset()) == place]
    source = Source(topic, partition, offset, record.timestamp()[1], run=2)
    line.send(record.value(), tier, repeat_headers(record.headers(), source))
    line.flush()
    return UUID(str(id))
