"""No commit passes an unfinished offset, whatever order jobs finish in and whatever Kafka does with the partitions."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from headrace.worker.offsets import Assignment, OffsetTracker


def delivered(*offsets: int) -> Assignment:
    assignment = Assignment("t", 0)
    for offset in offsets:
        assignment.deliver(offset)
    return assignment


def test_nothing_is_committable_before_a_delivery() -> None:
    assert Assignment("t", 0).committable is None


def test_the_lowest_unfinished_offset_is_committable() -> None:
    assignment = delivered(5, 6, 7)
    assignment.done(6)
    assert assignment.committable == 5
    assignment.done(5)
    assert assignment.committable == 7
    assignment.done(7)
    assert assignment.committable == 8


def test_gaps_between_offsets_are_not_waited_for() -> None:
    assignment = delivered(5, 9, 40)
    assignment.done(5)
    assert assignment.committable == 9
    assignment.done(40)
    assignment.done(9)
    assert assignment.committable == 41


def test_one_slow_record_holds_up_what_is_done_behind_it() -> None:
    assignment = delivered(*range(100))
    for offset in range(1, 100):
        assignment.done(offset)
    assert (assignment.committable, assignment.span) == (0, 100)
    assignment.done(0)
    assert (assignment.committable, assignment.span) == (100, 0)


def test_offsets_that_go_back_are_other_records_and_pass_none_that_is_unfinished() -> None:
    tracker = OffsetTracker()
    tracker.assign("t", 0)
    before = [tracker.deliver("t", 0, offset) for offset in (3, 5, 9)]
    again = tracker.deliver("t", 0, 5)  # the log was truncated there
    assert again is not None
    assert before[1] is not None
    before[1].done(5)  # what was there is finished, and says nothing of what is there now
    assert tracker.committable() == {("t", 0): 3}
    for old in before:
        assert old is not None
        assert not old.revoked
        old.done(3)
        old.done(9)
    assert tracker.committable() == {("t", 0): 5}
    again.done(5)
    assert tracker.committable() == {("t", 0): 6}
    tracker.revoke("t", 0)
    assert again.revoked
    assert all(old is not None and old.revoked for old in before)


def test_partitions_that_start_over_wait_for_nothing_that_was_before() -> None:
    tracker = OffsetTracker()
    tracker.assign("t", 0)
    tracker.deliver("t", 0, 5)
    tracker.start_over()
    assert tracker.committable() == {}
    new = tracker.deliver("t", 0, 0)
    assert new is not None
    new.done(0)
    assert tracker.committable() == {("t", 0): 1}


def test_a_former_epoch_moves_nothing() -> None:
    tracker = OffsetTracker()
    tracker.assign("t", 0)
    old = tracker.deliver("t", 0, 5)
    tracker.revoke("t", 0)
    tracker.assign("t", 0)
    new = tracker.deliver("t", 0, 5)

    assert old is not None
    assert old.revoked
    old.done(5)
    assert tracker.committable() == {("t", 0): 5}
    assert new is not None
    new.done(5)
    assert tracker.committable() == {("t", 0): 6}


def test_an_assignment_without_a_revoke_closes_the_epoch_before_it() -> None:
    tracker = OffsetTracker()
    first = tracker.assign("t", 0)
    second = tracker.assign("t", 0)
    assert (first.revoked, second.revoked) == (True, False)


def test_what_is_not_assigned_is_dropped() -> None:
    tracker = OffsetTracker()
    assert tracker.deliver("t", 0, 5) is None
    tracker.revoke("t", 0)
    assert tracker.committable() == {}


@given(st.permutations(range(30)), st.sets(st.integers(0, 29)))
def test_any_order_of_ends_leaves_the_lowest_unfinished(order: list[int], never: set[int]) -> None:
    assignment = delivered(*range(30))
    left = set(range(30))
    for offset in order:
        if offset not in never:
            assignment.done(offset)
            left.discard(offset)
        assert assignment.committable == min(left, default=30)
    assert assignment.span == (30 - min(never) if never else 0)


class Rebalances(RuleBasedStateMachine):
    """A partition that is delivered, finished late, revoked, lost, rewound and assigned again, in any order.

    The model: what this assignment delivered and has not finished. Commits go to a broker that keeps the last one.
    """

    deliveries = Bundle("deliveries")

    def __init__(self) -> None:
        super().__init__()
        self.tracker = OffsetTracker()
        self.unfinished: set[tuple[Assignment, int]] = set()
        self.next_offset = 0
        self.committed = 0
        self.finished: set[int] = set()  # in any epoch, by anybody

    @initialize()
    def first_assignment(self) -> None:
        self.assign()

    @rule()
    def assign(self) -> None:
        """Also without a revoke: librdkafka's lost flag can be dropped."""
        self.tracker.assign("t", 0)
        self.unfinished.clear()
        self.next_offset = self.committed

    @rule()
    def revoke(self) -> None:
        self.commit()
        self.tracker.revoke("t", 0)
        self.unfinished.clear()

    @rule(target=deliveries, gaps=st.lists(st.integers(1, 3), min_size=1, max_size=8))
    def deliver(self, gaps: list[int]) -> object:
        taken = []
        for gap in gaps:
            assignment = self.tracker.deliver("t", 0, self.next_offset)
            if assignment is None:
                return multiple()
            taken.append((assignment, self.next_offset))
            self.unfinished.add((assignment, self.next_offset))
            self.next_offset += gap
        return multiple(*taken)

    @rule(back=st.integers(1, 20))
    def rewind(self, back: int) -> None:
        """The log was truncated, or the position reset: older offsets come again in the same assignment."""
        self.next_offset = max(0, self.next_offset - back)

    @rule(delivery=consumes(deliveries))
    def finish(self, delivery: tuple[Assignment, int]) -> None:
        assignment, offset = delivery
        assignment.done(offset)
        self.finished.add(offset)
        self.unfinished.discard((assignment, offset))

    @rule()
    def commit(self) -> None:
        self.committed = self.tracker.committable().get(("t", 0), self.committed)

    @invariant()
    def no_commit_passes_an_unfinished_offset(self) -> None:
        offset = self.tracker.committable().get(("t", 0))
        assert offset is None or offset <= min((at for _, at in self.unfinished), default=offset)


TestRebalances = Rebalances.TestCase
