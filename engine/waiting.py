"""The sequences that are not running, in the order in which they are to be seated.

Priority first, then deadline, then arrival. Among those of one priority and deadline, up to a window of them at a time is
reordered along the trie of their prompts, so that prompts that begin alike run together: the prefix is computed once and
decoded as a group, also when the cache could not hold every prefix that waits. A more urgent arrival gets a window before
that one, which is left as it is.
"""

import heapq
from collections import deque
from collections.abc import Iterable

from headrace.engine.sequence import Sequence, SequenceStatus, Urgency

ORDERED_BY = 4096
"""Tokens of a prompt that decide its place in a window."""


class WaitingQueue:
    """A heap of sequences and, before it, the windows that are being seated. Ended sequences are passed over."""

    def __init__(self, window: int) -> None:
        self._size = window
        self._heap: list[tuple[Urgency, Sequence]] = []
        self._windows: list[deque[Sequence]] = []  # none is empty, each of one class, the most urgent last

    def push(self, seq: Sequence) -> None:
        """Add a sequence where its urgency puts it."""
        heapq.heappush(self._heap, (seq.urgency, seq))

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Return sequences that were popped: each is the next of its class again, those given first before the others."""
        for seq in reversed(list(sequences)):
            at, its_class = len(self._windows), _class(seq.urgency)
            while at and _class(self._windows[at - 1][0].urgency) < its_class:
                at -= 1
            if at and _class(self._windows[at - 1][0].urgency) == its_class:
                self._windows[at - 1].appendleft(seq)
            else:
                self._windows.insert(at, deque([seq]))

    def head(self) -> Sequence | None:
        """What ``pop`` would return."""
        while True:
            while self._heap and _has_ended(self._heap[0][1]):
                heapq.heappop(self._heap)
            while self._windows and _has_ended(self._windows[-1][0]):
                self._take()
            foremost = _class(self._windows[-1][0].urgency) if self._windows else None
            if not self._heap or (foremost is not None and foremost <= self._foremost()):
                return self._windows[-1][0] if self._windows else None
            self._windows.append(self._planned())

    def pop(self) -> Sequence:
        """Take the next sequence; there must be one."""
        if self.head() is None:
            raise IndexError("no sequence is waiting")
        return self._take()

    def _take(self) -> Sequence:
        window = self._windows[-1]
        seq = window.popleft()
        if not window:
            self._windows.pop()
        return seq

    def _planned(self) -> deque[Sequence]:
        """Take the most urgent sequences of one class from the heap, ordered by prompt."""
        taken: list[Sequence] = []
        while (
            self._heap
            and len(taken) < self._size
            and (not taken or self._foremost() == _class(taken[0].urgency))
        ):
            _, seq = heapq.heappop(self._heap)
            if not _has_ended(seq):
                taken.append(seq)
        # Bytes compare faster than token ids and put equal beginnings next to each other just as well.
        return deque(sorted(taken, key=lambda seq: seq.tokens[:ORDERED_BY].tobytes()))

    def _foremost(self) -> tuple[int, float]:
        """The class of the most urgent sequence on the heap."""
        return _class(self._heap[0][0])


def _has_ended(seq: Sequence) -> bool:
    """Whether it waits no more: it was aborted, say."""
    return seq.status is not SequenceStatus.WAITING


def _class(urgency: Urgency) -> tuple[int, float]:
    """Sequences of one class may change places."""
    return urgency[:2]
