"""Calls to Postgres in bulk, off the worker's thread: what gathers while one call runs is the next call's batch.

So a quiet worker writes at once, a busy one writes hundreds of rows a call, and no wait is ever configured. While
Postgres is away the batch is tried again and again, and what comes meanwhile gathers behind it; that is bounded
because every item belongs to a delivery, and consumers pause on those. The results store is called in the same way.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from headrace.ledger.errors import LedgerUnavailable
from headrace.ledger.outage import Outage
from headrace.store import StoreUnavailable
from headrace.worker.metrics import CallMeter

log = logging.getLogger(__name__)

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

MOST = 1000  # items a call: a few milliseconds of Postgres
AGAIN_AFTER_S = 1.0
AWAY = {LedgerUnavailable: "Postgres", StoreUnavailable: "the results store"}


class BulkCall(Generic[I, R]):
    """One kind of call, one at a time, in order. ``wake`` is set when a result is there."""

    def __init__(
        self,
        name: str,
        call: Callable[[list[I]], R],
        wake: threading.Event,
        most: int = MOST,
        meter: CallMeter | None = None,
    ) -> None:
        self.name, self._meter = name, meter
        self._call, self._wake, self._most = call, wake, most
        self._items: deque[I] = deque()
        self._results: deque[tuple[list[I], R]] = deque()
        self._batch: list[I] = []  # in the call
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, items: Iterable[I]) -> None:
        """Hand items over; each comes back in exactly one batch of ``results``."""
        with self._more:
            self._items.extend(items)
            self._more.notify()

    def results(self) -> list[tuple[list[I], R]]:
        """The batches done since the last call. Raises what a call raised, unless Postgres was merely away."""
        if self._failure is not None:
            raise self._failure
        done = []
        while self._results:
            done.append(self._results.popleft())
        return done

    @property
    def pending(self) -> int:
        """Items whose result is not there yet."""
        return len(self._items) + len(self._batch)

    @property
    def idle(self) -> bool:
        """Nothing handed over that has not come back."""
        return not self.pending and not self._results

    def give_up(self) -> list[I]:
        """Call no more, and take back what has no result yet: none will come. What is in a call may still be done."""
        with self._more:
            self._stopping.set()
            self._more.notify()
            left = [*self._batch, *self._items]
            self._batch = []
            self._items.clear()
        return left

    def close(self) -> None:
        """End after the call in progress; what gathered is forgotten."""
        with self._more:
            self._stopping.set()
            self._more.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while batch := self._next():
                result = self._insist(batch)
                if result is None:
                    return
                with self._more:
                    if self._batch:  # else given up meanwhile
                        self._results.append((batch, result[0]))
                        self._batch = []
                self._wake.set()
        except BaseException as error:
            self._failure = error
            self._wake.set()

    def _next(self) -> list[I]:
        with self._more:
            self._more.wait_for(lambda: self._items or self._stopping.is_set())
            if self._stopping.is_set():
                return []
            # Counted twice for a moment: who asks meanwhile must not find it idle.
            self._batch = list(itertools.islice(self._items, self._most))
            for _ in self._batch:
                self._items.popleft()
            return self._batch

    def _insist(self, batch: list[I]) -> tuple[R] | None:
        """Call until there is an answer; None if told to stop first."""
        outage = Outage(log)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                result = self._call(batch)
                if self._meter is not None:
                    self._meter.done(time.monotonic() - began, len(batch))
                outage.over()
                return (result,)
            except tuple(AWAY) as error:
                if self._meter is not None:
                    self._meter.unavailable()
                whom = AWAY[type(error)]
                outage.lasts(whom, f"{self.name}: {self.pending} items wait for {whom}", error)
                self._stopping.wait(AGAIN_AFTER_S)
        return None
