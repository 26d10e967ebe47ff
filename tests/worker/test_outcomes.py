"""What is published where the table holds another outcome than the one just computed: that one, and nothing of ours."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import pytest

from headrace.ledger import Finished, Ledger, OutcomeRow, StoredJob
from headrace.ledger.errors import LedgerUnavailable
from headrace.schemas import ErrorCode, JobError, JobResult, JobState, Topics
from headrace.worker import WorkerConfig, bulk, outcomes
from headrace.worker.held import Held
from headrace.worker.job import Job
from headrace.worker.metrics import Metrics
from headrace.worker.outcomes import Outcomes
from headrace.worker.publisher import Publication

TOPICS = Topics(prefix="t")
OURS = JobError(code=ErrorCode.INTERNAL_ERROR, message="a defect")
THEIRS = JobError(code=ErrorCode.ENGINE_FAILURE, message="it died")


class Topic:
    """A publisher that keeps what it is given."""

    unconfirmed = unconfirmed_bytes = 0

    def __init__(self, settings: Any) -> None:
        self.published: list[Publication] = []

    def put(self, publication: Publication) -> None:
        self.published.append(publication)

    def confirmed(self) -> list[Publication]:
        return []

    def close(self) -> None: ...


class ToldLedger:
    """Says of each outcome what it is told to, once; then that the row has been changed."""

    answer: Finished | None = None

    def finish(self, rows: Sequence[OutcomeRow]) -> Finished:
        answer, self.answer = self.answer, None
        return answer or Finished(frozenset(row.job.id for row in rows))


class Bench:
    def __init__(self) -> None:
        self.ledger = ToldLedger()
        self.looked_up: list[Job] = []
        self.metrics = Metrics(["bulk"], "m")
        self.outcomes = Outcomes(
            WorkerConfig("127.0.0.1:1", TOPICS, name="ours"),
            "m",
            cast(Ledger, self.ledger),
            Held(lambda delivery: None),
            self.metrics,
            self.looked_up.append,
            threading.Event(),
        )
        self.topic = cast(Topic, self.outcomes._publisher)

    @property
    def published(self) -> list[tuple[str, bytes | None]]:
        return [(each.topic, each.value) for each in self.topic.published]

    def turn_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            self.outcomes.turn()
            time.sleep(0.001)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(outcomes, "Publisher", Topic)
    made = Bench()
    yield made
    made.outcomes.close()


def result(job: Job, state: JobState, error: JobError | None = None) -> bytes:
    return JobResult(id=job.row.id, state=state, error=error).encode()


def test_a_job_that_somebody_else_answered_first_is_no_dead_letter_for_our_failure(
    bench: Bench, job: Job
) -> None:
    answer = result(job, JobState.SUCCEEDED)
    bench.ledger.answer = Finished(winners={job.row.id: answer})
    bench.outcomes.fail(job, OURS)
    bench.turn_until(lambda: bench.published)
    assert bench.published == [(TOPICS.results, answer)]


def test_a_job_that_somebody_else_failed_first_is_a_dead_letter_for_their_reason(
    bench: Bench, job: Job
) -> None:
    failure = result(job, JobState.FAILED, THEIRS)
    bench.ledger.answer = Finished(winners={job.row.id: failure})
    bench.outcomes.end_as(job, JobState.EXPIRED)
    bench.turn_until(lambda: bench.published)
    assert bench.published == [(TOPICS.results, failure), (TOPICS.dead, job.deliveries[0].value)]
    assert job.dead_letter == THEIRS


def test_an_end_that_was_written_unheard_is_told_and_counted_once_and_another_workers_is_not(
    bench: Bench, job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres goes after the row is written, and before the whole bulk is."""
    monkeypatch.setattr(bulk, "AGAIN_AFTER_S", 0.01)
    caplog.set_level("INFO", logger="headrace.worker.job_log")
    tries: list[bytes] = []

    def finish(rows: Sequence[OutcomeRow]) -> Finished:
        tries.append(rows[0].body)
        if len(tries) == 1:
            raise LedgerUnavailable("gone")
        return Finished(winners={job.row.id: tries[0]})

    monkeypatch.setattr(bench.ledger, "finish", finish)
    bench.outcomes.end_as(job, JobState.EXPIRED)
    bench.turn_until(lambda: bench.published)
    assert bench.published == [(TOPICS.results, tries[0])]
    assert caplog.messages.count("job expired") == 1
    ended = {"tier": "bulk", "state": "expired"}
    assert bench.metrics.registry.get_sample_value("headrace_jobs_total", ended) == 1

    tries[0] = tries[0].replace(b"ours", b"them")
    bench.outcomes.end_as(job, JobState.EXPIRED)
    bench.turn_until(lambda: len(bench.published) == 2)
    assert bench.metrics.registry.get_sample_value("headrace_jobs_total", ended) == 1
    assert caplog.messages.count("job expired") == 1


def test_cancelled_jobs_are_told_by_their_number_once_for_many(
    bench: Bench, job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="headrace.worker.job_log")
    all_there, writes = threading.Event(), []

    def finish(rows: Sequence[OutcomeRow]) -> Finished:
        all_there.wait(120)
        writes.append(len(rows))
        return Finished(frozenset(row.job.id for row in rows))

    monkeypatch.setattr(bench.ledger, "finish", finish)
    for _ in range(40):
        row = replace(job.row, id=uuid4())
        bench.outcomes.end_as(replace(job, row=row, deliveries=list(job.deliveries)), JobState.CANCELLED)
    all_there.set()
    bench.turn_until(lambda: len(bench.published) == 40)
    told = [re.fullmatch(r"(\d+) cancelled jobs? ended", message) for message in caplog.messages]
    assert sum(int(each[1]) for each in told if each) == 40
    assert len(told) <= len(writes) < 40


def test_our_own_failure_that_counts_is_a_dead_letter(bench: Bench, job: Job) -> None:
    bench.outcomes.fail(job, OURS)
    bench.turn_until(lambda: bench.published)
    assert [topic for topic, _ in bench.published] == [TOPICS.results, TOPICS.dead]


def test_a_job_answered_in_a_later_run_is_no_dead_letter_for_our_failure_in_an_earlier_one(
    bench: Bench, job: Job
) -> None:
    bench.ledger.answer = Finished()  # its row is in a later run
    bench.outcomes.fail(job, OURS)
    bench.turn_until(lambda: bench.looked_up)
    answer = result(job, JobState.SUCCEEDED)
    bench.outcomes.publish_stored(job, StoredJob(job.row.id, JobState.SUCCEEDED, run=2, result=answer))
    assert bench.published == [(TOPICS.results, answer)]


def test_a_job_that_ends_otherwise_in_its_next_run_here_is_no_dead_letter_either(
    bench: Bench, job: Job
) -> None:
    bench.ledger.answer = Finished()
    bench.outcomes.fail(job, OURS)
    bench.turn_until(lambda: bench.looked_up)
    bench.outcomes.end_as(job, JobState.CANCELLED)
    bench.turn_until(lambda: bench.published)
    assert [topic for topic, _ in bench.published] == [TOPICS.results]
