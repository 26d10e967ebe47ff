"""What whoever runs a worker can ask it."""

import json
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from pipeline import Pipeline, health_server
from standin import StandInEngine

from headrace.worker.health import HealthServer, Status

STATUS = Status("w", "m", True, False, {"standard": 4}, {"standard": 1}, 3, 2, 1, 0)


def ask(port: int, path: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            body = error.read()
        return error.code, json.loads(body) if body.startswith(b"{") else {}


@pytest.mark.parametrize(
    ("is_ready", "age", "live", "ready"),
    [
        (True, 0, 200, 200),
        (False, 0, 200, 503),
        (True, 1000, 503, 503),  # the loop stands still
    ],
)
def test_live_and_ready_say_so_by_their_status(is_ready: bool, age: float, live: int, ready: int) -> None:
    status = replace(STATUS, ready=is_ready, at=time.monotonic() - age)
    server = HealthServer(0, lambda: status)
    try:
        assert ask(server.port, "/live")[0] == live
        assert ask(server.port, "/ready")[0] == ready
        code, said = ask(server.port, "/status")
        assert (code, said["worker"], said["in_flight"]) == (200, "w", 2)
        assert age <= said["age_s"] < age + 60
        assert "at" not in said  # of a clock that means nothing to others
        assert ask(server.port, "/secrets")[0] == 404
    finally:
        server.close()


def test_a_worker_lives_while_its_model_is_loaded_and_is_ready_once_it_is(line: Pipeline) -> None:
    health = health_server()
    told = {}

    def load() -> StandInEngine:
        told.update({path: ask(health.port, path) for path in ("/live", "/ready")})
        return StandInEngine()

    worker = line.start_worker(load, health=health)
    assert told["/live"][0] == 200
    assert told["/ready"][0] == 503
    assert "the model is not loaded yet" in told["/ready"][1]["paused"]
    line.wait_for(lambda: ask(health.port, "/ready")[0] == 200)
    assert ask(health.port, "/status")[1]["paused"] is None
    worker.close()


def test_a_worker_is_ready_once_it_takes_jobs(line: Pipeline) -> None:
    worker = line.start_worker()
    line.submit("x")
    line.wait_terminal(1)
    line.wait_for(lambda: worker.worker.status().partitions["standard"] == 4)
    status = worker.worker.status()
    worker.close()
    assert (status.ready, status.live, status.stopping) == (True, True, False)
