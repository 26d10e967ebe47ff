"""What people ask and are answered is nobody else's business: not in a log, not in a metric."""

import io
import json
import logging
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from pipeline import Pipeline, health_server
from recorders import running

from headrace.cli import logs
from headrace.ledger import Ledger
from headrace.ledger.recorder import Recorder
from headrace.schemas import topics
from headrace.settings import Settings
from headrace.worker.health import HealthServer

CANARY = "the patient is Ada"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the commands log to stderr, at INFO and with every field."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.configure(Settings(log_level="info", log_format="json"))
    yield stderr
    root.handlers[:] = before
    root.setLevel(level)


@contextmanager
def recording(line: Pipeline) -> Iterator[int]:
    """A recorder at work, and the port of its health."""
    with Ledger(line.database_url) as ledger:
        recorder = Recorder(line.bootstrap, line.topics, ledger)
        server = HealthServer(0, recorder.status, recorder.metrics.registry)
        with closing(server), running(recorder):
            yield server.port


def page(port: int | None, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return str(response.read().decode())


def submit_all(line: Pipeline) -> None:
    """Jobs that end in every way, each with the canary wherever a producer can put it."""
    line.submit(CANARY, batch_id="b", custom_id=CANARY, metadata={CANARY: CANARY}, tenant=CANARY)
    line.submit(CANARY, stranger=CANARY)
    line.submit(f"fail:{CANARY}", batch_id="b", custom_id=CANARY)
    line.submit("flaky:1", metadata={"note": CANARY})
    line.submit(f"\0{CANARY}\ud800")
    for bad in (
        {"sampling": {"temperature": CANARY}},
        {"sampling": CANARY},
        {"model": CANARY},
        {"requires": [CANARY]},
        {"metadata": {"note": [CANARY]}},
        {"response_format": {"type": "regex", "regex": f"({CANARY}"}},
        {"messages": [{"role": CANARY, "content": CANARY}]},
        {"deadline": "2020-01-01T00:00:00Z"},
    ):
        line.submit(CANARY, **bad)
    line.send(
        CANARY.encode(), headers=[(topics.CUSTOM_ID, CANARY.encode()), ("traceparent", CANARY.encode())]
    )
    line.send({"prompt": CANARY, "custom_id": [CANARY]})
    line.send({"prompt": CANARY, "job_id": CANARY * 100})
    line.send({CANARY: CANARY} | {"prompt": [[[CANARY]]], "tenant": [CANARY]})
    line.producer.produce(line.topics.control, value=json.dumps({"kind": CANARY, CANARY: 1}).encode())
    line.flush()


def test_no_log_line_and_no_metric_tells_what_was_asked_or_answered(
    line: Pipeline, told: io.StringIO
) -> None:
    with recording(line) as recorder_port:
        worker = line.start_worker(health=health_server())
        submit_all(line)
        line.dead_letters(1)
        line.wait_for(lambda: line.lag() == 0 and line.states()["queued"] == line.states()["running"] == 0)
        shown = [page(port, "/metrics") for port in (recorder_port, worker.health_port)]
        shown.append(page(worker.health_port, "/status"))
        worker.close()
    states = line.states()
    assert states["succeeded"] >= 3
    assert states["failed"] >= 5
    assert states["expired"] == 1
    assert CANARY not in told.getvalue()
    assert not any(CANARY in text for text in shown)

    lines = [json.loads(text) for text in told.getvalue().splitlines()]
    events = {each["event"] for each in lines}
    assert {"job failed", "job expired", "record rejected", "attempt failed, trying again"} <= events
    failed = [each for each in lines if each["event"] == "job failed"]
    assert all(each["job_id"] and each["code"] for each in failed)
    assert {"b", None} == {each["batch_id"] for each in failed}
