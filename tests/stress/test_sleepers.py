"""A worker that sleeps past its session (SIGSTOP, a paused machine) and wakes up when others have its work."""

import os
import signal
from pathlib import Path

import crash_points
import pytest
from fleet import TIERS, Fleet, MakeFleet, Process, name_of

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

OPEN = "SELECT count(*) FROM attempts WHERE ended_at IS NULL AND worker LIKE %s"
LONG_S = 30  # a sleeper that is done has as long to say so first
BEGUN_LONG_AGO = f"SELECT count(*) FROM attempts WHERE started_at < now() - interval '{LONG_S} s'"
ALIVE = "SELECT count(*) FROM workers WHERE alive_until > now() AND worker LIKE %s"
ATTEMPTS_OF_OTHERS = "SELECT * FROM attempts WHERE worker NOT LIKE %s ORDER BY id, run, attempt"
ROWS = "SELECT id, run, state, attempt, finished_at FROM jobs ORDER BY id"
BOTH = pytest.mark.parametrize("protocol", ["classic", "consumer"], indirect=True)


def send_to_sleep(fleet: Fleet, worker: Process) -> None:
    """Stop it, and return when everybody takes it for dead."""
    os.kill(worker.pid, signal.SIGSTOP)
    fleet.wait(lambda: fleet.count(ALIVE, name_of(worker)) == 0, "the sleeper's heartbeat runs out")


def wake(fleet: Fleet, worker: Process) -> None:
    """Let it go on, and return when it has ended all that it held."""
    os.kill(worker.pid, signal.SIGCONT)
    fleet.wait(lambda: fleet.count(ALIVE, name_of(worker)) == 1, "the sleeper's heart beats again")
    fleet.wait(lambda: fleet.count(OPEN, name_of(worker)) == 0, "the sleeper has ended its attempts")


@BOTH
def test_one_that_wakes_up_when_all_is_done_touches_nothing(make_fleet: MakeFleet, protocol: str) -> None:
    fleet = make_fleet(group_protocol=protocol)
    fleet.start(workers=1)
    sleeper = fleet.workers[0]
    fleet.send(2000)
    fleet.wait_ended(200)
    send_to_sleep(fleet, sleeper)
    in_its_engine = fleet.count(OPEN, name_of(sleeper))
    fleet.join()
    fleet.finish()
    rows, offsets = fleet.line.query(ROWS), [fleet.line.committed(tier) for tier in TIERS]
    others = fleet.line.query(ATTEMPTS_OF_OTHERS, name_of(sleeper))
    assert in_its_engine > 0
    assert len(others) > 0

    wake(fleet, sleeper)
    fleet.settle()
    assert fleet.line.query(ROWS) == rows
    assert [fleet.line.committed(tier) for tier in TIERS] == offsets
    assert fleet.line.query(ATTEMPTS_OF_OTHERS, name_of(sleeper)) == others
    fleet.assert_books_balance(run_again=in_its_engine)


@BOTH
def test_one_that_wakes_up_alone_finishes_what_nobody_else_has(make_fleet: MakeFleet, protocol: str) -> None:
    fleet = make_fleet(group_protocol=protocol)
    fleet.start(workers=1)
    (sleeper,) = fleet.workers
    fleet.send(2000)
    fleet.wait_ended(200)
    send_to_sleep(fleet, sleeper)
    wake_and_go_on(fleet, sleeper)
    fleet.join()
    fleet.settle()
    fleet.assert_books_balance()


def wake_and_go_on(fleet: Fleet, worker: Process) -> None:
    ended = fleet.ended()
    os.kill(worker.pid, signal.SIGCONT)
    fleet.wait_ended(ended + 200)


def test_one_that_falls_asleep_in_mid_transaction_holds_the_others_up_for_a_while_only(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet()
    fleet.start(workers=2)
    sleeper = fleet.start_worker(crash=crash_points.ASLEEP)
    fleet.send(2000)
    fleet.wait(lambda: state_of(sleeper) == "T", "the sleeper sleeps")
    in_its_engine = fleet.count(OPEN, name_of(sleeper))
    fleet.finish()
    os.kill(sleeper.pid, signal.SIGCONT)
    fleet.workers.append(sleeper)
    fleet.settle()
    fleet.assert_books_balance(run_again=in_its_engine)


def state_of(process: Process) -> str:
    """As ps has it: T for one that was stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_one_that_wakes_up_first_wins_and_leaves_the_other_workers_attempts_alone(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet()
    fleet.start(workers=1)
    (sleeper,) = fleet.workers
    # One partition, so that the other worker gets them all at one time and has none done before the sleeper wakes up.
    for _ in range(40):
        fleet.submit(f"slow:{LONG_S}", {"tier": "standard", "partition": 0})
    fleet.line.flush()
    fleet.wait(lambda: fleet.count(OPEN, name_of(sleeper)) == 40, "the sleeper runs them all")
    send_to_sleep(fleet, sleeper)
    fleet.wait(lambda: fleet.count(BEGUN_LONG_AGO) == 40, "the sleeper will be done when it wakes up")
    other = fleet.join()
    fleet.wait(lambda: fleet.count(OPEN, name_of(other)) == 40, "the other worker runs them all")

    wake(fleet, sleeper)
    first_ended = fleet.line.query("SELECT id, finished_at FROM jobs ORDER BY id")
    fleet.settle()
    assert fleet.line.query("SELECT id, finished_at FROM jobs ORDER BY id") == first_ended
    winners = fleet.count("SELECT count(*) FROM results WHERE body->>'worker' LIKE %s", name_of(sleeper))
    assert winners == 40
    # The other's attempts ended when the other was done with them, which was after the rows had ended.
    later = (
        "SELECT count(*) FROM attempts JOIN jobs USING (id) WHERE worker LIKE %s AND ended_at > finished_at"
    )
    assert fleet.count(later, name_of(other)) == 40
    fleet.assert_books_balance(run_again=40)
