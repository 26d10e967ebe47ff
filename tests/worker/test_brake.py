"""Too many dead letters: the worker stops taking jobs, says why, and tries again."""

import json
import logging
import urllib.error
import urllib.request

import pytest
from pipeline import Pipeline, health_server

from headrace.worker.brake import Brake, DeadLetterLimit

LIMIT = DeadLetterLimit(most=10, share=0.5, window_s=60, pause_s=30, longest_pause_s=100)


def note(brake: Brake, dead: int, well: int = 0, now: float = 0.0) -> None:
    for _ in range(well):
        brake.note(dead=False, now=now)
    for _ in range(dead):
        brake.note(dead=True, now=now)


def test_up_to_the_limit_all_is_well() -> None:
    brake = Brake(LIMIT)
    note(brake, dead=10)
    assert brake.reason(0) is None
    note(brake, dead=1)
    reason = brake.reason(0)
    assert reason is not None
    assert "11 of the 11 records" in reason


def test_a_busy_workers_few_bad_records_are_no_reason() -> None:
    brake = Brake(LIMIT)
    note(brake, dead=50, well=100)
    assert brake.reason(0) is None


def test_what_died_long_ago_is_forgotten() -> None:
    brake = Brake(LIMIT)
    note(brake, dead=10, now=0)
    note(brake, dead=10, now=61)
    assert brake.reason(61) is None


@pytest.mark.parametrize("most", [None, 0])
def test_there_may_be_no_limit(most: int | None) -> None:
    brake = Brake(DeadLetterLimit(most=most))
    note(brake, dead=5000)
    assert brake.reason(0) is None


def test_pauses_double_while_nothing_gets_better_and_start_over_afterwards() -> None:
    brake, now, pauses = Brake(LIMIT), 1000.0, []
    for _ in range(4):
        note(brake, dead=11, now=now)
        began = now
        while brake.reason(now) is not None:
            now += 1
        pauses.append(now - began)
    assert pauses == [30, 60, 100, 100]
    now += LIMIT.window_s + 1
    note(brake, dead=11, now=now)
    assert brake.reason(now + 29) is not None
    assert brake.reason(now + 30) is None


def spend(brake: Brake, seconds: int, bad: int, well: int) -> tuple[int, int, list[int]]:
    """Live through so many seconds in which so many records end, where any are taken.

    Returns how many became dead letters, how many did not, and the seconds at which the pauses began.
    """
    lost = done = 0
    began, paused = [], False
    for now in range(seconds):
        before, paused = paused, brake.reason(float(now)) is not None
        if paused and not before:
            began.append(now)
        if not paused:
            note(brake, dead=bad, well=well, now=float(now))
            lost, done = lost + bad, done + well
    return lost, done, began


@pytest.mark.parametrize(
    ("bad", "well", "paused_at"),
    [(9, 91, 1112), (16, 800, 626), (2, 3, 5001)],
    ids=["a tenth of the jobs", "just below the limit of a minute", "slow and mostly bad"],
)
def test_a_part_that_is_lost_steadily_is_bounded_by_the_hour(bad: int, well: int, paused_at: int) -> None:
    lost, _, began = spend(Brake(DeadLetterLimit()), 3 * 3600, bad, well)
    assert lost <= 3 * (10_000 + bad)
    assert began[:1] == ([paused_at] if paused_at < 3600 else [])


def test_after_its_hour_a_worker_takes_jobs_again() -> None:
    brake = Brake(LIMIT)  # a hundred in an hour
    note(brake, dead=101, well=900, now=0)
    assert "101 of the 1,001 records" in (brake.reason(0) or "")
    assert brake.reason(3599) is not None
    assert brake.reason(3600) is None
    note(brake, dead=5, now=3600)
    assert brake.reason(3600) is None


def test_too_much_in_the_last_moment_of_an_hour_pauses_no_shorter_than_in_a_minute() -> None:
    brake = Brake(LIMIT)
    for minute in range(10):
        note(brake, dead=10, now=120.0 * minute)
    assert brake.reason(1200.0) is None
    note(brake, dead=11, now=3599.0)
    assert brake.reason(3599.0 + 29) is not None
    assert brake.reason(3599.0 + 31) is None


def test_a_fleet_with_some_bad_input_is_never_stopped() -> None:
    for bad, well in ((2, 98), (9, 991)):  # 2% of a hundred a second, and just below 1% of a thousand
        lost, done, began = spend(Brake(DeadLetterLimit()), 3600, bad, well)
        assert (lost, done, began) == (3600 * bad, 3600 * well, [])


def send_rubbish(line: Pipeline, count: int) -> None:
    for n in range(count):
        line.send(b"{no json", partition=n % 4)
    line.flush()


def rejections(line: Pipeline) -> int:
    ((count,),) = line.query("SELECT count(*) FROM rejections")
    return int(count)


def test_a_worker_that_dead_letters_too_much_stops_taking_jobs(
    line: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    send_rubbish(line, 600)
    worker = line.start_worker(dead_letters=DeadLetterLimit(most=50, pause_s=3600), health=health_server())
    line.wait_for(lambda: worker.worker.status().paused)

    status = worker.worker.status()
    assert not status.ready
    assert status.live
    port = worker.health_port
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60)
    with refused.value as answer:
        assert "became dead letters" in json.load(answer)["paused"]
    told = [record for record in caplog.records if "became dead letters" in record.getMessage()]
    assert {record.levelno for record in told} == {logging.ERROR}
    line.wait_for(lambda: rejections(line) > 50)
    line.wait_until_steady(lambda: rejections(line), seconds=1.0)
    assert rejections(line) < 600
    worker.close()


def test_a_worker_that_stopped_goes_on_later_and_rubbish_passes_pause_by_pause(
    line: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    send_rubbish(line, 600)
    good = line.submit("hello")  # behind the rubbish
    limit = DeadLetterLimit(most=50, pause_s=0.5, longest_pause_s=0.5, hourly=20)
    worker = line.start_worker(dead_letters=limit)
    line.wait_for(lambda: line.rows().get(good) == "succeeded")
    line.wait_for(lambda: line.lag() == 0)
    worker.close()
    assert rejections(line) == 600
    told = [record.getMessage() for record in caplog.records]
    assert sum("taking no more jobs" in each for each in told) >= 2
    assert sum("taking jobs again" in each for each in told) >= 2


def test_a_file_that_was_changed_and_sent_again_under_its_ids_stops_nobody(line: Pipeline) -> None:
    worker = line.start_worker(dead_letters=DeadLetterLimit(most=5))
    for prompt in ("as it was", "changed"):
        for number in range(50):
            line.send({"job_id": f"line {number}", "prompt": prompt}, partition=number % 4)
        line.flush()
        line.wait_terminal(50)
    line.wait_for(lambda: rejections(line) == 50)
    line.wait_for(lambda: line.lag() == 0)
    assert worker.worker.status().paused is None
    last = line.submit("somebody else's")
    line.wait_for(lambda: line.rows().get(last) == "succeeded")


def test_another_worker_goes_on_where_a_paused_one_stopped(line: Pipeline) -> None:
    paused = line.start_worker(dead_letters=DeadLetterLimit(most=5))
    send_rubbish(line, 300)
    line.wait_for(lambda: paused.worker.status().paused)
    paused.close()
    line.start_worker(dead_letters=DeadLetterLimit(most=None))
    line.wait_for(lambda: line.lag() == 0)
    assert rejections(line) == 300
