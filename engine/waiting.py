"""The sequences that are not running, in the order in which they are to be seated.

Priority first, then deadline, then arrival. Among those of one priority and deadline, up to a window of them at a time is
reordered along the trie of their prompts, so that prompts that begin alike run together: the prefix is computed once and
decoded as a group, also when the cache could not hold every prefix that waits.
"""

import heapq
from collections import deque
from collections.abc import Iterable

from headrace.engine.sequence import Sequence, SequenceStatus, Urgency


class WaitingQueue:
    """A heap of sequences and, before it, the window that is being seated. Ended sequences are passed over."""

    def __init__(self, window: int) -> None:
        self._size = window
        self._heap: list[tuple[Urgency, Sequence]] = []
        self._window: deque[Sequence] = deque()

    def push(self, seq: Sequence) -> None:
        """Add a sequence where its urgency puts it."""
        heapq.heappush(self._heap, (seq.urgency, seq))

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Return sequences that were popped and not seated: they are next again, in the order given."""
        self._window.extendleft(reversed(list(sequences)))

    def head(self) -> Sequence | None:
        """What ``pop`` would return."""
        while True:
            if not self._window or (self._heap and self._foremost() < _class(self._window[0].urgency)):
                self._plan()
            if not self._window:
                return None
            if self._window[0].status is SequenceStatus.WAITING:
                return self._window[0]
            self._window.popleft()

    def pop(self) -> Sequence:
        """Take the next sequence; there must be one."""
        seq = self.head()
        if seq is None:
            raise IndexError("no sequence is waiting")
        return self._window.popleft()

    def _plan(self) -> None:
        """Fill the window with the most urgent sequences of one class, ordered by prompt."""
        for seq in self._window:
            self.push(seq)
        self._window.clear()
        taken: list[Sequence] = []
        while (
            self._heap
            and len(taken) < self._size
            and (not taken or self._foremost() == _class(taken[0].urgency))
        ):
            _, seq = heapq.heappop(self._heap)
            if seq.status is SequenceStatus.WAITING:
                taken.append(seq)
        # Bytes compare faster than token ids and put equal beginnings next to each other just as well.
        self._window.extend(sorted(taken, key=lambda seq: seq.tokens.tobytes()))

    def _foremost(self) -> tuple[int, float]:
        """The class of the most urgent sequence on the heap."""
        return _class(self._heap[0][0])


def _class(urgency: Urgency) -> tuple[int, float]:
    """Sequences of one class may change places."""
    return urgency[:2]
