"""Who makes way for whom: each clause of the rule by itself, on a scheduler with a symbolic executor."""

import pytest
from scheduler_harness import VOCAB, Harness
from symbolic_executor import expected

from headrace.engine.errors import EngineError
from headrace.engine.priorities import Priorities, Priority

INTERACTIVE, STANDARD, BULK = range(3)


def full_of_bulk(slots=4, **options):
    """Every slot decodes a bulk sequence with a long way to go."""
    h = Harness(max_slots=slots, budget=64, **options)
    for i in range(slots):
        h.add(f"bulk-{i}", [10 + i, i], max_tokens=60, priority=BULK)
    for _ in range(3):
        h.step()
    assert len(h.running()) == slots
    return h


def test_a_burst_of_urgent_newcomers_runs_in_the_very_step_it_is_met():
    h = full_of_bulk(slots=4)
    for i in range(3):
        h.add(f"urgent-{i}", [50 + i] * 5, max_tokens=2, priority=INTERACTIVE)
    plan = h.step()
    assert h.running() >= {"urgent-0", "urgent-1", "urgent-2"}
    assert plan.num_tokens == 3 * 5 + 1
    done = h.run()
    for i in range(4):
        assert done[f"bulk-{i}"].token_ids == expected([10 + i, i], 60, VOCAB)


def test_no_more_newcomers_push_in_than_the_step_can_compute():
    h = full_of_bulk(slots=4)
    for i in range(4):
        h.add(f"urgent-{i}", [50 + i] * 40, max_tokens=2, priority=INTERACTIVE)
    h.step()
    assert h.scheduler.stats().preemptions == 2, "64 tokens a step: two prompts of 40 begin, no more"


def test_equals_never_make_way():
    h = full_of_bulk()
    h.add("equal", [50], max_tokens=2, priority=BULK)
    for _ in range(5):
        h.step()
    assert "equal" not in h.running()
    assert h.scheduler.stats().preemptions == 0


def test_a_less_urgent_newcomer_never_pushes_in():
    h = full_of_bulk()
    h.add("later", [50], max_tokens=2, priority=BULK + 1)
    h.step()
    assert h.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_sequence_makes_way_at_most_so_many_times(most):
    priorities = Priorities([Priority(), Priority(), Priority(max_preemptions=most)])
    h = full_of_bulk(slots=1, priorities=priorities)
    for i in range(most + 2):
        h.add(f"urgent-{i}", [50 + i], max_tokens=1, priority=INTERACTIVE)
        while f"urgent-{i}" not in h.completions:
            h.step()
        while "bulk-0" not in h.running() and "bulk-0" not in h.completions:
            h.step()
    done = h.run()
    assert done["bulk-0"].preemptions == most
    assert done["bulk-0"].token_ids == expected([10, 0], 60, VOCAB)


def test_a_priority_that_may_not_preempt_waits_for_the_next_free_place():
    h = full_of_bulk(priorities=Priorities([Priority(preempts=False)]))
    h.add("polite", [50], max_tokens=2, priority=INTERACTIVE)
    h.add("bulk-next", [51], max_tokens=2, priority=BULK)
    h.step()
    assert "polite" not in h.running()
    h.scheduler.abort("bulk-2")
    h.step()
    assert "polite" in h.running()
    h.run()
    assert h.scheduler.stats().preemptions == 0


def test_the_lowest_priority_makes_way_first_then_the_latest_deadline_then_the_least_generated():
    h = Harness(max_slots=5, budget=64)
    h.add("standard", [1], max_tokens=60, priority=STANDARD)
    h.add("old", [2], max_tokens=60, priority=BULK)
    h.add("hurried", [3], max_tokens=60, priority=BULK, deadline=100.0)
    h.add("at leisure", [4], max_tokens=60, priority=BULK, deadline=900.0)
    for _ in range(3):
        h.step()
    h.add("young", [5], max_tokens=60, priority=BULK)
    h.step()
    left = []
    for i in range(5):
        before = h.running()
        h.add(f"urgent-{i}", [50 + i], max_tokens=60, priority=INTERACTIVE)
        h.step()
        left += before - h.running()
    assert left == ["young", "old", "at leisure", "hurried", "standard"]


def test_nobody_makes_way_for_a_newcomer_that_would_not_fit_even_then():
    h = Harness(num_blocks=8, max_slots=4, max_context=32)
    h.add("equal", [1] * 20, max_tokens=4, priority=INTERACTIVE)
    h.add("bulk", [2] * 4, max_tokens=12, priority=BULK)
    h.step()
    h.step()
    h.add("urgent", [3] * 24, max_tokens=2, priority=INTERACTIVE)
    h.step()
    assert h.scheduler.stats().preemptions == 0
    assert len(h.run()) == 3


def test_blocks_that_a_newcomer_shares_need_nobody_to_make_way():
    h = Harness(num_blocks=24, max_slots=8, budget=128, max_context=96)
    prefix = list(range(40))
    h.add("owner", [*prefix, 90], max_tokens=50, priority=BULK)
    h.add("other", [70] * 40, max_tokens=50, priority=BULK)
    h.step()
    h.step()
    h.add("sibling", [*prefix, 91], max_tokens=1, priority=INTERACTIVE)
    h.step()
    assert "sibling" in h.completions
    assert h.scheduler.stats().preemptions == 0


def test_nobody_makes_way_who_need_not():
    """The small one would go first, but the large one, which must go, frees enough alone."""
    h = Harness(num_blocks=16, block_size=4, max_slots=8, budget=128, max_context=64)
    h.add("large", [1] * 40, max_tokens=12, priority=BULK)
    h.step()
    h.add("small", [2] * 12, max_tokens=12, priority=BULK)
    h.step()
    h.add("urgent", [3] * 32, max_tokens=1, priority=INTERACTIVE)
    h.step()
    assert {name for name, seq in h.sequences.items() if seq.displaced} == {"large"}
    assert len(h.run()) == 3


def test_slots_and_blocks_are_kept_free_for_the_priority_that_reserves_them():
    h = Harness(
        max_slots=4,
        num_blocks=40,
        budget=200,
        max_context=64,
        priorities=Priorities([Priority(reserve=0.25)]),
    )
    for i in range(4):
        h.add(f"bulk-{i}", [10 + i] * 4, max_tokens=40, priority=BULK)
    h.step()
    assert len(h.running()) == 3, "a slot of four stays free"
    h.add("urgent", [50] * 8, max_tokens=40, priority=INTERACTIVE)
    h.step()
    assert "urgent" in h.running()
    assert h.scheduler.stats().preemptions == 0

    h = Harness(
        max_slots=8, num_blocks=20, budget=200, max_context=64, priorities=Priorities([Priority(reserve=0.5)])
    )
    for i in range(4):
        h.add(f"bulk-{i}", [10 + i] * 20, max_tokens=4, priority=BULK)
    h.step()
    assert len(h.running()) == 2, "10 blocks of 20 stay free"


def test_one_that_is_alone_may_use_what_is_reserved_for_others():
    h = Harness(num_blocks=16, max_context=64, budget=64, priorities=Priorities([Priority(reserve=0.5)]))
    h.add("bulk", [1] * 50, max_tokens=4, priority=BULK)
    assert h.run()["bulk"].token_ids == expected([1] * 50, 4, VOCAB)


def test_reserves_that_leave_nothing_are_refused():
    with pytest.raises(EngineError, match="reserve"):
        Priorities([Priority(reserve=0.5), Priority(reserve=0.5)])
    with pytest.raises(EngineError, match="reserve"):
        Priority(reserve=1.0)
    with pytest.raises(EngineError, match="max_preemptions"):
        Priority(max_preemptions=-1)
