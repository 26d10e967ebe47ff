"""Which offsets may be committed: pure bookkeeping of what was delivered and what is done.

Jobs finish out of order, and a committed offset is the only confirmation that everything below it is finished. So
the committable offset of a partition is the lowest delivered one that is not done. Gaps between offsets (compaction,
transaction markers) are normal and need no care: what was never delivered is never waited for.

Every assignment of a partition is an *epoch* of its own. What a former epoch still holds may be finished late, and
then moves nothing: after a revoke the offset is the next owner's.

Offsets may go back within an assignment: a log was truncated, or its topic made anew. What comes then may be other records
under the same offsets, so that is a new epoch too, which yet commits nothing that the one before has not finished.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Assignment:
    """One partition, from its assignment to this consumer until it is taken away (``revoked``).

    before: the epoch that ended when offsets went back, while this consumer kept the partition.

    The flag is written by the consumer's thread and read by the worker's, which drops waiting jobs of a revoked
    assignment; a stale read costs only one job that two workers then know of.
    """

    topic: str
    partition: int
    revoked: bool = False
    before: "Assignment | None" = None
    _outstanding: set[int] = field(default_factory=set)
    _heap: list[int] = field(default_factory=list)  # outstanding and done offsets; its head is the lowest
    _position: int | None = None  # last delivered + 1

    def deliver(self, offset: int) -> None:
        """Note a delivery; offsets grow within an epoch."""
        self._outstanding.add(offset)
        heapq.heappush(self._heap, offset)
        self._position = offset + 1

    def has_passed(self, offset: int) -> bool:
        """Whether this offset, or a later one, was delivered already."""
        return self._position is not None and offset < self._position

    def done(self, offset: int) -> None:
        """Note that nothing more will come of this record. Unknown offsets are ignored."""
        self._outstanding.discard(offset)
        while self._heap and self._heap[0] not in self._outstanding:
            heapq.heappop(self._heap)

    @property
    def committable(self) -> int | None:
        """The offset to commit: the lowest delivered that is not done; None before anything was delivered."""
        return min((each._heap[0] for each in self.epochs() if each._heap), default=self._position)

    def epochs(self) -> "Iterator[Assignment]":
        """This one and those before it."""
        epoch: Assignment | None = self
        while epoch is not None:
            yield epoch
            epoch = epoch.before

    @property
    def span(self) -> int:
        """Deliveries at and past the committable offset, done or not: what a crash now would deliver again."""
        return len(self._heap)


class OffsetTracker:
    """The current assignments of one consumer. Used by its thread alone."""

    def __init__(self) -> None:
        self._current: dict[tuple[str, int], Assignment] = {}

    def assign(self, topic: str, partition: int) -> Assignment:
        """Begin a new epoch of the partition; an epoch still open (its revoke was never told) is closed."""
        self.revoke(topic, partition)
        assignment = self._current[topic, partition] = Assignment(topic, partition)
        return assignment

    def revoke(self, topic: str, partition: int) -> None:
        """Close the partition's epoch. A partition that is not assigned is ignored."""
        assignment = self._current.pop((topic, partition), None)
        for epoch in assignment.epochs() if assignment is not None else ():
            epoch.revoked = True

    def deliver(self, topic: str, partition: int, offset: int) -> Assignment | None:
        """Note a delivery; None if it must be dropped: the partition is not assigned now."""
        assignment = self._current.get((topic, partition))
        if assignment is None:
            return None
        if assignment.has_passed(offset):
            assignment = self._current[topic, partition] = Assignment(topic, partition, before=assignment)
        assignment.deliver(offset)
        return assignment

    def start_over(self) -> None:
        """All partitions are other ones under the same names: no former offset means anything in them."""
        for place in self._current:
            self._current[place] = Assignment(*place)

    def committable(self) -> dict[tuple[str, int], int]:
        """What may be committed now, for the partitions assigned now."""
        offsets = ((key, assignment.committable) for key, assignment in self._current.items())
        return {key: offset for key, offset in offsets if offset is not None}

    @property
    def assignments(self) -> list[Assignment]:
        """The partitions assigned now."""
        return list(self._current.values())
