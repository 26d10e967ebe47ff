"""An attempt that a clean stop meets on its way to the engine is ended, and never begun there."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast
from uuid import UUID

from headrace.ledger import AttemptRow, Begun, Ledger
from headrace.worker.attempts import Attempts
from headrace.worker.consumer import Delivery
from headrace.worker.job import Job, read
from headrace.worker.metrics import Metrics
from headrace.worker.offsets import Assignment
from headrace.worker.running import Running


class SlowLedger:
    """Answers ``begin`` when it is let."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ended: list[UUID] = []

    def begin(self, attempts: Sequence[AttemptRow]) -> Begun:
        self.go_on.wait(10)
        return Begun(frozenset(row.job.id for row in attempts))

    def end_attempts(self, worker: str, ids: Iterable[UUID], *, died: bool) -> None:
        assert not died
        self.ended += ids


class IdleEngine:
    ready = True

    def __init__(self) -> None:
        self.started: list[Any] = []

    def start(self, jobs: Iterable[Any]) -> None:
        self.started += jobs

    def collect(self, timeout: float) -> list[Any]:
        return []

    def abort_all(self) -> None: ...
    def reopen(self) -> None: ...
    def close(self) -> None: ...


def test_an_attempt_that_is_being_written_at_a_stop_is_given_back() -> None:
    ledger, engine = SlowLedger(), IdleEngine()
    record = Delivery("bulk", Assignment("t", 0), 7, 1_800_000_000_000, None, b'{"prompt": "x"}', [])
    job = read(record, "pool", frozenset())
    assert isinstance(job, Job)
    attempts = Attempts(
        "w",
        cast(Running, engine),
        cast(Ledger, ledger),
        cast(Any, None),
        Metrics(["bulk"], "m"),
        rank=lambda job: 0,
        release=lambda job: None,
        look_up=lambda job: None,
        park=lambda job, until: None,
        wake=threading.Event(),
    )
    try:
        attempts.begin([job])
        attempts.give_back()
        ledger.go_on.set()
        deadline = time.monotonic() + 10
        while attempts and time.monotonic() < deadline:
            attempts.turn(time.time(), 0.0)
            time.sleep(0.001)
        assert (engine.started, ledger.ended, len(attempts)) == ([], [job.row.id], 0)
    finally:
        attempts.close()
