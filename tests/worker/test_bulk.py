"""What gathers while one call runs is the next call's batch; nothing is lost while Postgres is away."""

import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from headrace.ledger import LedgerUnavailable
from headrace.worker import bulk
from headrace.worker.bulk import BulkCall


@pytest.fixture
def open_calls() -> Iterator[list[BulkCall[int, list[int]]]]:
    made: list[BulkCall[int, list[int]]] = []
    yield made
    for call in made:
        call.close()


def collect(
    call: BulkCall[int, list[int]], count: int, wake: threading.Event
) -> list[tuple[list[int], list[int]]]:
    done: list[tuple[list[int], list[int]]] = []
    deadline = time.monotonic() + 120
    while sum(len(items) for items, _ in done) < count and time.monotonic() < deadline:
        wake.wait(0.1)
        wake.clear()
        done += call.results()
    return done


def test_items_that_gather_during_a_call_go_together(open_calls: list[BulkCall[int, list[int]]]) -> None:
    wake, gate = threading.Event(), threading.Event()

    def double(items: list[int]) -> list[int]:
        gate.wait(120)
        return [2 * item for item in items]

    call = BulkCall("double", double, wake, most=4)
    open_calls.append(call)
    call.put([0])
    while call._items:  # until the first call has it
        time.sleep(0.001)
    call.put(range(1, 7))
    assert (call.pending, call.idle) == (7, False)
    gate.set()

    done = collect(call, 7, wake)
    assert [items for items, _ in done] == [[0], [1, 2, 3, 4], [5, 6]]
    assert all(result == [2 * item for item in items] for items, result in done)
    assert call.idle


def test_a_batch_waits_while_postgres_is_away(
    open_calls: list[BulkCall[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "AGAIN_AFTER_S", 0.01)
    wake, tries = threading.Event(), []

    def flaky(items: list[int]) -> list[int]:
        tries.append(items)
        if len(tries) < 3:
            raise LedgerUnavailable("away")
        return items

    call = BulkCall("flaky", flaky, wake)
    open_calls.append(call)
    call.put([1, 2])
    assert collect(call, 2, wake) == [([1, 2], [1, 2])]
    assert tries == [[1, 2]] * 3


def test_any_other_error_reaches_the_worker(open_calls: list[BulkCall[int, list[int]]]) -> None:
    wake = threading.Event()

    def broken(items: list[int]) -> list[int]:
        raise ZeroDivisionError

    call = BulkCall("broken", broken, wake)
    open_calls.append(call)
    call.put([1])
    assert wake.wait(120)
    with pytest.raises(ZeroDivisionError):
        call.results()


def test_closing_does_not_wait_for_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def away(items: list[int]) -> list[int]:
        tried.set()
        raise LedgerUnavailable("away")

    monkeypatch.setattr(bulk, "AGAIN_AFTER_S", 3600.0)
    call: BulkCall[int, list[int]] = BulkCall("away", away, threading.Event())
    call.put([1])
    assert tried.wait(120)
    call.close()
    assert not call._thread.is_alive()


def test_a_call_is_not_idle_while_its_batch_is_being_gathered(
    open_calls: list[BulkCall[int, list[int]]],
) -> None:
    idle: list[bool] = []

    class Watched(deque[int]):
        def popleft(self) -> int:
            item = super().popleft()
            idle.append(call.idle)
            return item

    wake = threading.Event()
    call: BulkCall[int, list[int]] = BulkCall("same", lambda items: items, wake)
    open_calls.append(call)
    call._items = Watched()
    call.put([1, 2])
    assert collect(call, 2, wake)
    assert idle == [False, False]


def test_what_is_given_up_comes_back_once_and_gets_no_result(
    open_calls: list[BulkCall[int, list[int]]],
) -> None:
    gate = threading.Event()

    def slow(items: list[int]) -> list[int]:
        gate.wait(10)
        return items

    call = BulkCall("slow", slow, threading.Event(), most=1)
    open_calls.append(call)
    call.put([1, 2, 3])
    while len(call._items) > 2:  # until the first is in the call
        time.sleep(0.001)
    assert call.give_up() == [1, 2, 3]
    gate.set()
    call.close()
    assert (call.results(), call.pending, call.idle) == ([], 0, True)
