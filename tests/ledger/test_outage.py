"""Who waits for long says so seldom."""

import logging

import pytest

from headrace.ledger.outage import Outage


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_an_outage_is_told_at_once_and_then_after_pauses_that_grow_to_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    outage = Outage(logging.getLogger("waits"), lambda: now)
    for second in range(300):
        now = float(second)
        outage.lasts("Postgres", "waiting for Postgres", "connection refused")
    later = [f", {second} s so far" for second in (1, 2, 4, 8, 16, 32, 64, 124, 184, 244)]
    assert caplog.messages == [f"waiting for Postgres{so_far}: connection refused" for so_far in ("", *later)]


def test_the_end_of_an_outage_is_told_and_the_next_one_at_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 10.0
    outage = Outage(logging.getLogger("waits"), lambda: now)
    outage.over()
    outage.lasts("Postgres", "3 records wait", "away")
    now = 10.5
    outage.lasts("Postgres", "3 records wait", "away")
    now = 12.0
    outage.over()
    outage.over()
    outage.lasts("Postgres", "4 records wait", "away")
    assert caplog.messages == ["3 records wait: away", "Postgres is back after 2 s", "4 records wait: away"]
