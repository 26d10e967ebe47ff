"""When a follower may believe that a batch is complete: against a recorder that lags behind Kafka, step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from threading import Event
from typing import Any, cast

import pytest
from confluent_kafka import Message

from headrace.cli import follow as following
from headrace.cli import promise as module
from headrace.cli.follow import follow
from headrace.cli.promise import KAFKA_AWAY_S, Promise
from headrace.client import BrokerUnreachable
from headrace.client.announced import Announced
from headrace.ledger import BatchProgress, BatchState, Ledger
from headrace.schemas import BatchClosed


@dataclass
class Record:
    """One of the control topic."""

    closed: BatchClosed

    def value(self) -> bytes:
        return self.closed.encode()[1]


def closed(submission: str | None, expected: int = 2) -> Record:
    return Record(BatchClosed(batch_id="b", expected=expected, submission=submission))


@dataclass
class Line:
    """A control topic, a recorder that has read so many of its records, and a table that shows each sending as complete.

    A step is what happens just before a look at the table.
    """

    topic: list[Record]
    recorded: int
    steps: "list[Callable[[Line], None]]"
    confirmed: int | None = None  # None: as many as are recorded
    kept_from: int = 0  # the first record that retention has left
    away: bool = False
    looks: int = 0
    asked: int = 0
    before_asking: "Callable[[Line], None] | None" = None

    def batch(self, tenant: str, batch_id: str) -> BatchProgress:
        assert self.looks < len(self.steps), "it hangs"
        self.steps[self.looks](self)
        self.looks += 1
        shown = told(self.topic[: self.recorded])
        count = shown.expected or 0
        return BatchProgress(
            tenant=tenant, batch_id=batch_id, state=BatchState.COMPLETE, expected=count, submitted=count, queued=0,
            running=0, succeeded=count, failed=0, cancelled=0, expired=0, rejected=0, prompt_tokens=0, cached_tokens=0,
            completion_tokens=0, opened_at=None, closed_at=None, submission=shown.submission,
        )  # fmt: skip

    def unread(self) -> Announced:
        self.asked += 1
        if self.before_asking is not None:
            self.before_asking(self)
        if self.away:
            raise BrokerUnreachable("Kafka does not answer: connection refused")
        confirmed = self.recorded if self.confirmed is None else self.confirmed
        return told(self.topic[max(confirmed, self.kept_from) :])

    def follow(self, expected: int = 0, sending: str | None = None) -> str | None:
        """The sending that the follower ended with."""
        promise = Promise(expected, sending, self.unread)
        ended = follow(cast(Ledger, self), "default", "b", Event(), promise=promise, quiet=True)
        assert ended is not None
        return ended.submission


def told(records: list[Record]) -> Announced:
    announced = Announced("default", "b")
    for record in records:
        announced.take(cast(Message, record))
    return announced


def record(count: int) -> Callable[[Line], None]:
    def step(line: Line) -> None:
        line.recorded = count

    return step


def nothing(line: Line) -> None:
    """The recorder is behind."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.0)


# By the sending's name, as `submit` follows, and by the batch's alone, as `status` and `results` do.
@pytest.fixture(params=[{"expected": 2, "sending": "two"}, {}], ids=["sending", "batch"])
def followed(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_an_equal_sending_that_the_recorder_has_not_read_is_waited_for(followed: Any) -> None:
    line = Line([closed("one"), closed("two")], 1, [nothing] * 50 + [record(2), nothing])
    assert line.follow(**followed) == "two"


def test_a_named_sending_that_the_table_shows_is_believed_without_a_question() -> None:
    line = Line([closed("one"), closed("two")], 2, [nothing])
    assert line.follow(2, "two") == "two"
    assert line.asked == 0


def test_a_batch_that_nobody_sent_again_is_asked_for_once() -> None:
    line = Line([closed("one")], 1, [nothing, nothing])
    assert line.follow() == "one"
    assert line.asked == 1


def test_a_later_equal_sending_that_takes_over_ends_it(followed: Any) -> None:
    line = Line([closed("one"), closed("two"), closed("three")], 1, [nothing] * 5 + [record(3)] + [nothing])
    assert line.follow(**followed) == "three"


def test_a_later_sending_that_was_there_before_the_first_look_ends_it(followed: Any) -> None:
    line = Line([closed("one"), closed("two"), closed("three")], 3, [nothing] * 2)
    assert line.follow(**followed) == "three"


def test_a_later_sending_that_is_not_recorded_when_the_followed_one_is_does_not_keep_it() -> None:
    line = Line([closed("one"), closed("two"), closed("three")], 1, [nothing, record(2)])
    assert line.follow(2, "two") == "two"


def test_a_sending_that_is_recorded_between_look_and_question_is_seen(followed: Any) -> None:
    line = Line([closed("one"), closed("two")], 1, [nothing, nothing], before_asking=record(2))
    assert line.follow(**followed) == "two"


def test_what_is_recorded_and_not_confirmed_yet_does_not_keep_it(followed: Any) -> None:
    line = Line([closed("one"), closed("two")], 2, [nothing, nothing], confirmed=0)
    assert line.follow(**followed) == "two"


def test_a_larger_sending_is_waited_for_before_anybody_has_read_it() -> None:
    line = Line([closed("one"), closed("two", 8)], 1, [nothing] * 5 + [record(2), nothing])
    assert line.follow() == "two"


@pytest.mark.parametrize("unread", [closed("two", 1), closed(None)], ids=["smaller", "unnamed"])
def test_a_close_that_will_change_nothing_is_not_waited_for(unread: Record) -> None:
    line = Line([closed("one"), unread], 1, [nothing, nothing])
    assert line.follow() == "one"


def test_where_retention_has_dropped_the_close_the_table_is_believed(followed: Any) -> None:
    line = Line([closed("one"), closed("two")], 1, [nothing, nothing], kept_from=2)
    assert line.follow(**followed) == "one"


def test_where_a_close_is_dropped_while_it_is_waited_for_the_table_is_believed(followed: Any) -> None:
    def drop(line: Line) -> None:
        line.kept_from = 2

    line = Line([closed("one"), closed("two")], 1, [nothing] * 5 + [drop, nothing, nothing])
    assert line.follow(**followed) == "one"


def test_kafka_is_waited_for_and_asked_again(
    followed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def back(line: Line) -> None:
        line.away = False

    line = Line(
        [closed("one"), closed("two")], 1, [nothing] * 5 + [back] + [nothing] * 5 + [record(2), nothing], away=True
    )  # fmt: skip
    assert line.follow(**followed) == "two"
    err = capsys.readouterr().err
    assert err.count("Whether batch b was sent again is not known (Kafka does not answer") == 1
    assert err.count("Kafka is back.") == 1


def test_kafka_that_stays_away_is_not_waited_for_without_end(
    followed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def later(line: Line) -> None:
        clock[0] += KAFKA_AWAY_S / 4

    line = Line([closed("one"), closed("two")], 1, [later] * 6, away=True)
    assert line.follow(**followed) == "one"
    assert line.asked == 5
    assert "what the job table says of batch b is believed" in capsys.readouterr().err


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_announced_is_what_the_table_will_show(database_url: str, at_once: bool) -> None:
    kinds = [("one", 2), ("two", 2), (None, 2), ("three", 3)]
    with Ledger(database_url) as ledger:
        for number, said in enumerate(product(kinds, repeat=3)):
            batch_id, announced = f"b{number}", Announced("default", f"b{number}")
            messages = [
                BatchClosed(batch_id=batch_id, expected=count, submission=name) for name, count in said
            ]
            for message in messages:
                announced.take(cast(Message, Record(message)))
            for bulk in [messages] if at_once else [[message] for message in messages]:
                ledger.apply_control(bulk)
            batch = ledger.batch("default", batch_id)
            assert batch is not None
            assert (batch.expected, batch.submission) == (announced.expected, announced.submission), said
            assert not announced.supersedes(batch.expected, batch.submission), said
