"""Attempts that a stop or a cancel meets while the job table is written: none is left open, none waits in vain."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import pytest

from headrace.ledger import AttemptRow, Begun, Ledger
from headrace.schemas import JobState
from headrace.worker.attempts import Attempts
from headrace.worker.job import Job
from headrace.worker.metrics import Metrics
from headrace.worker.running import Running


class SlowLedger:
    """Answers ``begin`` when it is let."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ended: list[UUID] = []

    def begin(self, attempts: Sequence[AttemptRow]) -> Begun:
        self.go_on.wait(120)
        return Begun(frozenset(row.job.id for row in attempts))

    def end_attempts(self, worker: str, ids: Iterable[UUID], *, died: bool, failed: bool) -> None:
        assert not died
        self.ended += ids


class IdleEngine:
    def __init__(self) -> None:
        self.ready = True
        self.started: list[Any] = []

    def start(self, jobs: Iterable[Any]) -> None:
        self.started += jobs

    def collect(self, timeout: float) -> list[Any]:
        return []

    def abort_all(self) -> None: ...
    def reopen(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Ends:
    """Outcomes of which only the verdicts are of interest."""

    verdicts: list[tuple[Job, JobState]] = field(default_factory=list)

    def end_as(self, job: Job, state: JobState) -> None:
        self.verdicts.append((job, state))


@dataclass
class Bench:
    """Attempts between a ledger and an engine that do as they are told, and where jobs went from there."""

    ledger: SlowLedger = field(default_factory=SlowLedger)
    engine: IdleEngine = field(default_factory=IdleEngine)
    ends: Ends = field(default_factory=Ends)
    parked: list[Job] = field(default_factory=list)
    looked_up: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attempts = Attempts(
            "w",
            cast(Running, self.engine),
            cast(Ledger, self.ledger),
            cast(Any, self.ends),
            Metrics(["bulk"], "m"),
            rank=lambda job: 0,
            release=lambda job: None,
            look_up=self.looked_up.append,
            park=lambda job, until: self.parked.append(job),
            wake=threading.Event(),
        )

    def turn_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            self.attempts.turn(time.time(), 0.0)
            time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.attempts.close()


def test_an_attempt_that_is_being_written_at_a_stop_is_given_back(bench: Bench, job: Job) -> None:
    bench.attempts.begin([job])
    bench.attempts.give_back()
    bench.ledger.go_on.set()
    bench.turn_until(lambda: not bench.attempts)
    assert (bench.engine.started, bench.ledger.ended, len(bench.attempts)) == ([], [job.row.id], 0)
    assert bench.parked == [job]


def test_a_job_cancelled_while_its_attempt_is_being_ended_does_not_wait_for_its_retry(
    bench: Bench, job: Job
) -> None:
    bench.ledger.go_on.set()
    bench.attempts.begin([job])
    bench.turn_until(lambda: bench.engine.started)
    bench.attempts._return([job], failed=True, until=time.time() + 60)
    job.verdict = JobState.CANCELLED
    bench.turn_until(lambda: not bench.attempts)
    assert (bench.looked_up, bench.parked) == ([job], [])


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.EXPIRED])
def test_a_job_that_has_begun_waits_for_no_new_engine_to_be_cancelled_or_to_expire(
    bench: Bench, job: Job, state: JobState
) -> None:
    bench.ledger.go_on.set()
    bench.engine.ready = False
    bench.attempts.begin([job])
    bench.turn_until(lambda: job.attempt)
    if state is JobState.CANCELLED:
        job.verdict = state
    else:
        job.deadline_s = time.time()
    bench.attempts.turn(time.time(), 0.0)
    assert bench.ends.verdicts == [(job, state)]
    bench.engine.ready = True
    bench.attempts.turn(time.time(), 0.0)
    assert (bench.engine.started, len(bench.attempts)) == ([], 0)


def test_a_job_that_has_begun_without_an_engine_starts_once_there_is_one(bench: Bench, job: Job) -> None:
    bench.ledger.go_on.set()
    bench.engine.ready = False
    bench.attempts.begin([job])
    bench.turn_until(lambda: job.attempt)
    bench.attempts.turn(time.time(), 0.0)
    assert (bench.engine.started, len(bench.attempts)) == ([], 1)
    bench.engine.ready = True
    bench.attempts.turn(time.time(), 0.0)
    assert [started for started, _ in bench.engine.started] == [job]
