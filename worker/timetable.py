"""Things that are due at a time: deadlines, and jobs parked until they may be tried again."""

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Timetable(Generic[T]):
    """A heap of (time, item). ``live`` tells which items still matter; the others are dropped now and then."""

    def __init__(self, live: Callable[[T], bool]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, T]] = []
        self._order = itertools.count()
        self._compact_at = 1024

    def put(self, when: float, item: T) -> None:
        heapq.heappush(self._heap, (when, next(self._order), item))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if self._live(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(1024, 2 * len(self._heap))

    def due(self, now: float) -> list[T]:
        """Take out the live items whose time has come, earliest first."""
        items = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)[2]
            if self._live(item):
                items.append(item)
        return items

    def __len__(self) -> int:
        return len(self._heap)
