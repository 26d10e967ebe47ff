"""What is published where the table holds another outcome than the one just computed: that one, and nothing of ours."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from headrace.ledger import Finished, Ledger, OutcomeRow, StoredJob
from headrace.schemas import ErrorCode, JobError, JobResult, JobState, Topics
from headrace.worker import WorkerConfig, outcomes
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
        self.outcomes = Outcomes(
            WorkerConfig("127.0.0.1:1", TOPICS),
            "m",
            cast(Ledger, self.ledger),
            Held(lambda delivery: None),
            Metrics(["bulk"], "m"),
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
