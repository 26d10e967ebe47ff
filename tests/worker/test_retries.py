"""Retriable and final errors, told apart in one table; the wait grows and is never the same for all."""

import pytest

from headrace.worker.retries import RETRIABLE, Retry, retry_for
from headrace.worker.timetable import Timetable


@pytest.mark.parametrize("code", ["invalid_request", "internal_error", "unheard_of"])
def test_what_the_table_does_not_name_is_final(code: str) -> None:
    assert retry_for(code, failure=1) is None


@pytest.mark.parametrize("code", sorted(RETRIABLE))
def test_the_table_says_how_often_a_passing_trouble_is_retried(code: str) -> None:
    allowed = RETRIABLE[code].attempts
    assert retry_for(code, failure=allowed - 1) is RETRIABLE[code]
    assert retry_for(code, failure=allowed) is None


def test_the_wait_doubles_up_to_a_limit_and_is_jittered() -> None:
    retry = Retry(first_s=1.0, longest_s=10.0)
    waits = {attempt: [retry.wait_s(attempt) for _ in range(200)] for attempt in (1, 2, 3, 10, 1000)}
    for attempt, ceiling in ((1, 1.0), (2, 2.0), (3, 4.0), (10, 10.0), (1000, 10.0)):
        assert ceiling / 2 <= min(waits[attempt]) < max(waits[attempt]) <= ceiling


def test_items_come_when_due_earliest_first() -> None:
    table: Timetable[str] = Timetable(lambda item: item != "ended")
    for when, item in ((3.0, "c"), (1.0, "a"), (2.0, "ended"), (9.0, "later")):
        table.put(when, item)
    assert table.due(0.5) == []
    assert table.due(5.0) == ["a", "c"]
    assert table.due(5.0) == []
    assert len(table) == 1


def test_a_timetable_forgets_what_no_longer_matters() -> None:
    live = {n: n % 100 == 0 for n in range(10_000)}
    table: Timetable[int] = Timetable(live.__getitem__)
    for n in live:
        table.put(1e9, n)
    assert len(table) < 1500
    assert set(table.due(1e9)) == {n for n, is_live in live.items() if is_live}
