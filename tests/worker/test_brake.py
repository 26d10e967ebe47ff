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
    limit = DeadLetterLimit(most=50, pause_s=0.5, longest_pause_s=0.5)
    worker = line.start_worker(dead_letters=limit)
    line.wait_for(lambda: line.rows().get(good) == "succeeded")
    line.wait_for(lambda: line.lag() == 0)
    worker.close()
    assert rejections(line) == 600
    told = [record.getMessage() for record in caplog.records]
    assert sum("taking no more jobs" in each for each in told) >= 2
    assert sum("taking jobs again" in each for each in told) >= 2


def test_another_worker_goes_on_where_a_paused_one_stopped(line: Pipeline) -> None:
    paused = line.start_worker(dead_letters=DeadLetterLimit(most=5))
    send_rubbish(line, 300)
    line.wait_for(lambda: paused.worker.status().paused)
    paused.close()
    line.start_worker(dead_letters=DeadLetterLimit(most=None))
    line.wait_for(lambda: line.lag() == 0)
    assert rejections(line) == 300
