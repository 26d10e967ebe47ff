"""How fast a batch goes, and when it will end."""

from dataclasses import replace

import pytest

from headrace.cli.follow import duration, sentence
from headrace.cli.pace import WINDOW_S, Pace
from headrace.ledger import BatchProgress, BatchState


def batch(
    succeeded: int = 0, *, failed: int = 0, running: int = 0, tokens: int = 0, expected: int | None = 10
) -> BatchProgress:
    return BatchProgress(
        tenant="default", batch_id="b", state=BatchState.OPEN, expected=expected, submitted=10,
        queued=10 - succeeded - failed - running, running=running, succeeded=succeeded, failed=failed, cancelled=0,
        expired=0, rejected=0, prompt_tokens=0, cached_tokens=0, completion_tokens=tokens, opened_at=None, closed_at=None,
    )  # fmt: skip


def test_rates_come_from_the_window() -> None:
    pace = Pace()
    pace.look(0.0, batch())
    glance = pace.look(2.0, batch(4, running=3, tokens=100))
    assert glance.tokens_per_s == 50
    assert glance.eta_s == pytest.approx(3.0)  # six jobs at two a second
    assert (glance.ended, glance.running, glance.queued) == (4, 3, 3)


def test_what_left_the_window_is_forgotten() -> None:
    pace = Pace()
    for second in range(int(2 * WINDOW_S) + 1):
        glance = pace.look(second, batch(1, tokens=0 if second <= WINDOW_S else 300))
    assert glance.tokens_per_s == pytest.approx(300 / WINDOW_S)


def test_nothing_is_promised_before_something_has_ended() -> None:
    pace = Pace()
    assert pace.look(0.0, batch()).eta_s is None
    assert pace.look(5.0, batch(running=8)).eta_s is None


def test_the_senders_count_stands_in_for_an_unread_close() -> None:
    glance = Pace(expected=20).look(0.0, batch(expected=None))
    assert (glance.total, glance.queued) == (20, 20)


def test_no_more_end_than_there_are() -> None:
    glance = Pace().look(0.0, replace(batch(3, expected=10), rejected=10))  # a changed file, sent again
    assert (glance.ended, glance.total, glance.queued) == (13, 20, 7)


def test_a_look_is_a_sentence() -> None:
    pace = Pace()
    pace.look(0.0, batch())
    glance = pace.look(1.0, batch(4, failed=1, running=2, tokens=40))
    assert sentence(glance) == "5/10 ended, 4 done, 1 failed, 2 running, 3 queued, 40 tokens/s, ETA 1s"


@pytest.mark.parametrize(("seconds", "text"), [(8.2, "8s"), (200, "3m 20s"), (7500, "2h 05m")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
