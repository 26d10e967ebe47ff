"""What a follower does, and says, while others are away."""

import io
from threading import Event, Thread

import postgres
import pytest
from rows import jobs, outcome
from waiting import eventually

from headrace.cli import results, waiting
from headrace.cli.follow import follow
from headrace.cli.promise import Promise
from headrace.cli.results import Format, Lines, Reader, write_results
from headrace.cli.waiting import QUIET_S, Waiting
from headrace.ledger import BatchProgress, BatchState, Ledger, LedgerUnavailable
from headrace.schemas import BatchClosed


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said on stderr."""
    said: list[str] = []
    monkeypatch.setattr(waiting, "note", said.append)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.01)
    monkeypatch.setattr(results, "POLL_S", 0.01)
    return said


class Away:
    """A job table that answers as it is told to: with an answer, or with an error."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = list(answers)

    def __call__(self) -> str:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


GONE = LedgerUnavailable("connection refused\nIs the server running?")


def test_postgres_is_waited_for_and_told_of_once_each_time(told: list[str]) -> None:
    questions, asker = Away("a", GONE, GONE, "b", GONE, "c"), Waiting(Event())
    assert [asker.ask(questions) for _ in range(3)] == ["a", "b", "c"]
    away, back = "Postgres does not answer (connection refused); waiting for it.", "Postgres is back."
    assert told == [away, back, away, back]


def test_a_postgres_that_is_away_at_the_start_is_an_error_at_once(told: list[str]) -> None:
    with pytest.raises(LedgerUnavailable):
        Waiting(Event()).ask(Away(GONE, "a"))
    assert told == []


def test_a_postgres_that_has_answered_another_question_is_waited_for_from_the_start(told: list[str]) -> None:
    assert Waiting(Event(), answered=True).ask(Away(GONE, "a")) == "a"


def test_who_has_seen_enough_does_not_wait_for_postgres(told: list[str]) -> None:
    stop = Event()
    questions, asker = Away("a", GONE), Waiting(stop)
    asker.ask(questions)
    stop.set()
    assert asker.ask(questions) is None


def batch(**counts: int) -> BatchProgress:
    given = {"expected": 8, "submitted": 4, "queued": 0, "running": 0, "succeeded": 4, **counts}
    return BatchProgress(
        tenant="default", batch_id="b", state=BatchState.CLOSED, failed=0, cancelled=0, expired=0, rejected=0,
        prompt_tokens=0, cached_tokens=0, completion_tokens=0, opened_at=None, closed_at=None, **given,
    )  # fmt: skip


@pytest.mark.parametrize("seen", [None, batch()])
def test_that_the_recorder_may_be_missing_is_told_once_where_nothing_runs(
    told: list[str], seen: BatchProgress | None
) -> None:
    asker = Waiting(Event(), "b")
    asker.look(0.0, batch(running=1))
    for second in range(1, 10 * int(QUIET_S)):
        asker.look(float(second), seen)
    assert len(told) == 1
    assert "Is `headrace recorder` running?" in told[0]
    asker.look(1000.0, batch(succeeded=3))
    asker.look(1000.0 + QUIET_S, batch(succeeded=3))
    assert len(told) == 2


@pytest.mark.parametrize("busy", [{"running": 1}, {"queued": 1}])
def test_nobody_is_missed_while_there_is_something_to_run(told: list[str], busy: dict[str, int]) -> None:
    asker = Waiting(Event(), "b")
    for second in range(10 * int(QUIET_S)):
        asker.look(float(second), batch(**busy))
    assert told == []


@pytest.mark.timeout(300)
def test_followers_go_on_when_postgres_is_back(
    postgres_server: postgres.Server, database_url: str, told: list[str]
) -> None:
    if not postgres_server.command:
        pytest.skip("the server named by HEADRACE_TEST_DATABASE_URL is not ours to stop")
    out, looks, ended = io.BytesIO(), [], []
    with Ledger(database_url, retry_for=0.1) as ledger, Ledger(database_url) as writer:
        rows = jobs(2)
        writer.record(rows)
        writer.apply_control([BatchClosed(tenant="acme", batch_id="b1", expected=2)])
        writer.finish([outcome(rows[0])])

        def write() -> None:
            lines = Lines(out, Format.JSONL, Reader(None))
            ended.append(write_results(ledger, "acme", "b1", lines, promise=Promise(), stop=Event()))

        def watch() -> None:
            seen = follow(ledger, "acme", "b1", Event(), quiet=True, meanwhile=lambda: looks.append(1))
            ended.append(seen)

        followers = [Thread(target=write, daemon=True), Thread(target=watch, daemon=True)]
        for each in followers:
            each.start()
        eventually(lambda: out.getvalue().count(b"\n") == 1 and len(looks) > 1)
        with postgres_server.away():
            eventually(lambda: len(told) == 2)  # one of each
        writer.finish([outcome(rows[1])])
        for each in followers:
            each.join(120)
    assert len(ended) == 2
    assert out.getvalue().count(b"\n") == 2
    assert told.count("Postgres is back.") == 2
