"""The waiting queue: urgency decides, and among equals prompts that begin alike run together."""

import random

import numpy as np
import pytest

from headrace.engine.request import Request
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.engine.waiting import WaitingQueue


def sequence(name, prompt, priority=0, deadline=None, arrival=0):
    return Sequence(
        request=Request(name, prompt, priority=priority, deadline=deadline), arrival=arrival, limit=9, seed=0,
        added_at=0.0, tokens=np.array(prompt, np.int32),
    )  # fmt: skip


def drained(queue):
    names = []
    while queue.head():
        names.append(queue.pop().id)
    return names


def queue_of(*sequences, window=8):
    queue = WaitingQueue(window)
    for seq in sequences:
        queue.push(seq)
    return queue


def test_priority_then_deadline_then_arrival():
    assert drained(
        queue_of(
            sequence("late", [1], priority=1, deadline=9.0, arrival=1),
            sequence("never", [1], priority=1, arrival=2),
            sequence("soon", [2], priority=1, deadline=5.0, arrival=3),
            sequence("urgent", [3], priority=0, arrival=4),
        )
    ) == ["urgent", "soon", "late", "never"]


def test_equals_that_begin_alike_stand_together_within_the_window():
    families = (("a", 0), ("b", 1))
    mixed = [
        sequence(f"{name}{i}", [token, i], arrival=2 * i + token)
        for i in range(3)
        for name, token in families
    ]
    assert drained(queue_of(*mixed)) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert drained(queue_of(*mixed, window=2)) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_more_urgent_arrival_comes_before_the_window_and_what_was_put_back_is_next():
    queue = queue_of(*(sequence(f"s{i}", [i], priority=1, arrival=i) for i in range(3)))
    queue.put_back([queue.pop()])
    assert queue.head().id == "s0"
    queue.push(sequence("urgent", [9], priority=0, arrival=9))
    assert drained(queue) == ["urgent", "s0", "s1", "s2"]


def test_ended_sequences_are_passed_over():
    gone, stays = sequence("gone", [1], arrival=0), sequence("stays", [2], arrival=1)
    queue = queue_of(gone, stays)
    assert queue.head() is gone
    gone.status = SequenceStatus.FINISHED
    assert drained(queue) == ["stays"]


def test_a_window_stays_as_it_was_ordered_when_more_urgent_ones_come_in_between():
    queue = queue_of(*(sequence(f"s{i}", [9 - i], priority=2, arrival=i) for i in range(4)), window=3)
    assert queue.pop().id == "s2"
    queue.push(sequence("sooner", [0], priority=1, arrival=5))
    assert queue.head().id == "sooner"
    queue.push(sequence("soonest", [0], priority=0, arrival=6))
    queue.push(sequence("later", [0], priority=2, arrival=7))
    assert drained(queue) == ["soonest", "sooner", "s1", "s0", "later", "s3"]


def test_what_comes_back_is_the_next_of_its_class_and_waits_for_more_urgent_ones():
    back = sequence("back", [9], priority=2, arrival=0)
    queue = queue_of(*(sequence(f"s{i}", [i], priority=2, arrival=i + 1) for i in range(2)))
    assert queue.head().id == "s0"
    queue.push(sequence("urgent", [0], priority=0, arrival=5))
    assert queue.head().id == "urgent"
    queue.put_back([back])
    assert drained(queue) == ["urgent", "back", "s0", "s1"]
    queue.push(sequence("new", [0], priority=2, arrival=6))
    queue.put_back([sequence("urgent", [0], priority=0), back])
    assert drained(queue) == ["urgent", "back", "new"]


def test_ended_sequences_are_passed_over_wherever_they_stand():
    sequences = [sequence(f"s{i}", [i], arrival=i) for i in range(4)]
    queue = queue_of(*sequences[:3])
    assert queue.head().id == "s0"
    queue.push(sequences[3])
    for ended in (0, 1, 2, 3):
        sequences[ended].status = SequenceStatus.FINISHED
    assert queue.head() is None


def test_an_ended_one_at_the_front_lets_no_less_urgent_ones_go_first():
    queue = queue_of(*(sequence(f"standard{i}", [i], priority=1, arrival=i) for i in range(2)))
    assert queue.head().id == "standard0"
    queue.push(sequence("bulk", [0], priority=2, arrival=5))
    ended = sequence("urgent", [0], priority=0, arrival=6)
    queue.push(ended)
    ended.status = SequenceStatus.FINISHED
    assert drained(queue) == ["standard0", "standard1", "bulk"]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_next_is_always_of_the_most_urgent_that_wait(seed):
    rng, queue, waiting, popped = random.Random(seed), WaitingQueue(3), [], []
    for step in range(300):
        match rng.choice(("push", "push", "pop", "back", "end")):
            case "push":
                waiting.append(
                    sequence(str(step), [rng.randrange(9)], priority=rng.randrange(4), arrival=step)
                )
                queue.push(waiting[-1])
            case "pop" if waiting:
                popped.append(queue.pop())
                assert popped[-1].urgency[:2] == min(seq.urgency[:2] for seq in waiting)
                waiting.remove(popped[-1])
            case "back" if popped:
                waiting.append(popped.pop(rng.randrange(len(popped))))
                queue.put_back([waiting[-1]])
            case "end" if waiting:
                waiting.pop(rng.randrange(len(waiting))).status = SequenceStatus.FINISHED
        assert (queue.head() is None) == (not waiting)
