"""The scheduler against a symbolic executor: every sequence reads its own history and ends once."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import VOCAB, Harness
from symbolic_executor import expected

from headrace.engine.priorities import Priorities, Priority
from headrace.engine.request import FinishReason
from headrace.engine.sequence import SequenceStatus


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33])
def test_a_prompt_of_any_length_gets_its_own_continuation(length, lag):
    h = Harness(lag=lag)
    prompt = list(range(length))
    h.add("a", prompt, max_tokens=10)
    assert h.run()["a"].token_ids == expected(prompt, 10, VOCAB)
    h.add("again", prompt, max_tokens=10)
    again = h.run()["again"]
    assert again.token_ids == expected(prompt, 10, VOCAB)
    assert again.cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_tiny_pool_preempts_and_still_answers_right(lag):
    h = Harness(num_blocks=12, max_slots=6, lag=lag, max_context=40)
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(6)}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=30)
    done = h.run()
    assert h.scheduler.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert done[name].token_ids == expected(prompt, 30, VOCAB)
        assert done[name].finish_reason is FinishReason.LENGTH


def test_siblings_share_a_prefix_within_one_step_and_fill_it_once():
    h = Harness(budget=64)
    shared = list(range(16))
    for i in range(4):
        h.add(f"r{i}", [*shared, 50 + i], max_tokens=1)
    plan = h.step()
    assert plan.num_tokens == 17 + 3, "the shared blocks were computed more than once"
    done = h.run()
    for i in range(4):
        assert done[f"r{i}"].token_ids == expected([*shared, 50 + i], 1, VOCAB)
    assert [done[f"r{i}"].cached_tokens for i in range(4)] == [0, 16, 16, 16]


def test_rows_that_share_a_long_prefix_decode_as_a_group():
    h = Harness(block_size=2, num_blocks=256, budget=64, max_slots=16)
    one, two = list(range(20)), list(range(50, 80))
    for i in range(5):
        h.add(f"one-{i}", [*one, 40 + i], max_tokens=6)
        h.add(f"two-{i}", [*two, 40 + i], max_tokens=4)
        h.add(f"alone-{i}", [90 - i] * 17, max_tokens=5)
    done = h.run()
    assert 5 in h.executor.groups_seen
    for i in range(5):
        assert done[f"one-{i}"].token_ids == expected([*one, 40 + i], 6, VOCAB)
        assert done[f"two-{i}"].token_ids == expected([*two, 40 + i], 4, VOCAB)
        assert done[f"alone-{i}"].token_ids == expected([90 - i] * 17, 5, VOCAB)


def test_rows_that_share_a_prefix_decode_apart_where_prefixes_are_not_to_be_merged():
    h = Harness(block_size=2, num_blocks=256, budget=64, max_slots=16, merge_prefixes=False)
    for i in range(5):
        h.add(f"r{i}", [*range(20), 40 + i], max_tokens=6)
    done = h.run()
    assert not h.executor.groups_seen
    assert [done[f"r{i}"].cached_tokens for i in range(1, 5)] == [20] * 4


def test_a_sibling_waits_for_a_prefix_that_is_being_filled_and_others_pass_it():
    h = Harness(budget=8)
    shared = list(range(24))
    h.add("first", [*shared, 1], max_tokens=2)
    h.add("sibling", [*shared, 2], max_tokens=2)
    h.add("other", [90, 91], max_tokens=2)
    done = h.run()
    assert done["sibling"].cached_tokens == 24
    assert done["sibling"].token_ids == expected([*shared, 2], 2, VOCAB)
    assert done["other"].token_ids == expected([90, 91], 2, VOCAB)


def test_a_prefix_whose_last_token_comes_in_a_chunk_of_its_own_can_be_shared():
    h = Harness(budget=5)
    h.add("first", [1, 2], max_tokens=1)
    h.add("owner", [7, 7, 7, 8], max_tokens=1)
    h.add("sibling", [7, 7, 7, 8, 9], max_tokens=1)
    assert h.run()["sibling"].cached_tokens == 4


def test_an_aborted_prefill_leaves_nothing_half_filled_to_be_found():
    h = Harness(budget=8)
    prompt = list(range(30))
    h.add("a", prompt)
    h.step()
    h.scheduler.abort("a")
    h.add("b", prompt, max_tokens=4)
    done = h.run()
    assert done["a"].finish_reason is FinishReason.ABORT
    assert done["b"].token_ids == expected(prompt, 4, VOCAB)
    assert done["b"].cached_tokens == 8


def test_salts_do_not_share():
    h = Harness()
    h.add("a", list(range(12)), salt="x")
    h.run()
    h.add("b", list(range(12)), salt="y")
    assert h.run()["b"].cached_tokens == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_stop_token_ends_the_sequence_and_is_left_out_even_at_the_limit(lag):
    prompt = [5, 6, 7]
    full = expected(prompt, 6, VOCAB)
    h = Harness(lag=lag)
    h.add("a", prompt, max_tokens=6, stop=[full[5]])
    h.add("b", prompt, max_tokens=6, stop=[full[2]])
    done = h.run()
    assert done["a"].token_ids == full[:5]
    assert (done["a"].finish_reason, done["a"].stop_reason) == (FinishReason.STOP, full[5])
    assert done["b"].token_ids == full[:2]


def test_the_text_side_can_cut_a_streaming_sequence():
    prompt = [5, 6, 7]
    h = Harness(lag=2)
    h.add("a", prompt, max_tokens=20, stream=True)
    for _ in range(8):
        h.step()
    h.scheduler.finish("a", 3)
    done = h.run()
    assert done["a"].token_ids == expected(prompt, 3, VOCAB)
    assert h.streamed["a"][:3] == done["a"].token_ids


def test_a_more_urgent_newcomer_takes_a_slot_from_a_less_urgent_sequence_but_never_from_an_equal():
    h = Harness(max_slots=2)
    h.add("bulk-0", [1, 2], max_tokens=40, priority=2)
    h.add("bulk-1", [3, 4], max_tokens=40, priority=2)
    for _ in range(5):
        h.step()
    h.add("equal", [5], max_tokens=2, priority=2)
    h.step()
    assert h.scheduler.stats().preemptions == 0
    h.add("urgent", [6], max_tokens=2, priority=0)
    h.step()
    assert h.scheduler.stats().preemptions == 1
    for _ in range(3):
        h.step()
    assert "urgent" in h.completions
    assert "equal" not in h.completions
    done = h.run()
    assert {c.preemptions for c in done.values()} == {0, 1}
    for name, prompt in {"bulk-0": [1, 2], "bulk-1": [3, 4]}.items():
        assert done[name].token_ids == expected(prompt, 40, VOCAB)


def test_nobody_is_displaced_for_a_newcomer_that_would_not_fit_even_then():
    h = Harness(num_blocks=8, max_slots=4, max_context=32)
    h.add("equal", [1] * 20, max_tokens=4, priority=0)
    h.add("bulk", [2] * 4, max_tokens=12, priority=5)
    h.step()
    h.step()
    h.add("urgent", [3] * 24, max_tokens=2, priority=0)
    h.step()
    assert h.scheduler.stats().preemptions == 0
    assert len(h.run()) == 3


def test_waste_is_one_partial_block_a_sequence():
    h = Harness(block_size=4, budget=64)
    for i in range(4):
        h.add(f"r{i}", [i] * (5 + i), max_tokens=20)
    h.step()
    stats = h.scheduler.stats()
    assert stats.wasted_tokens <= 4 * 3
    assert stats.blocks_live * 4 - stats.wasted_tokens == sum(5 + i for i in range(4))


def test_partial_blocks_waste_less_than_four_percent_on_chat_like_lengths():
    rng = np.random.default_rng(0)
    h = Harness(num_blocks=12_500, block_size=32, max_slots=400, budget=8192, max_context=4096)
    for i in range(400):
        prompt_len, max_tokens = (int(np.clip(rng.lognormal(np.log(180), 1.0), 4, 2048)) for _ in range(2))
        h.add(f"r{i}", rng.integers(0, VOCAB, prompt_len).tolist(), max_tokens=max_tokens)
    wasted = live = 0
    while h.scheduler.has_work:
        plan = h.scheduler.schedule()
        h.scheduler.retire(plan, np.zeros(len(plan.sample_rows), np.int64))
        stats = h.scheduler.stats()
        wasted += stats.wasted_tokens
        live += stats.blocks_live * stats.block_size
    assert 0.01 < wasted / live < 0.04


priorities = st.builds(
    Priority,
    reserve=st.sampled_from([0.0, 0.1, 0.3]),
    preempts=st.booleans(),
    max_preemptions=st.integers(0, 2),
)
requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # family: prompts of one family begin alike
        st.integers(1, 40),  # prompt length
        st.integers(1, 24),  # max_tokens
        st.integers(0, 2),  # priority
        st.integers(0, 12),  # step at which it arrives
        st.sampled_from(["run", "run", "run", "abort", "stream"]),
    ),
    min_size=1,
    max_size=14,
)


@pytest.fixture(autouse=True)
def _short_prefixes_count(monkeypatch):
    monkeypatch.setattr("headrace.engine.sharers.LEAST_SHARERS", 2)
    monkeypatch.setattr("headrace.engine.sharers.LEAST_SHARED_BLOCKS", 1)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=requests,
    lag=st.integers(0, 2),
    budget=st.integers(4, 40),
    num_blocks=st.integers(16, 40),
    slots=st.integers(1, 6),
    prefix_cache=st.booleans(),
    treated=st.lists(priorities, max_size=3),
    spoiling=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_whatever_arrives_every_sequence_ends_once_with_its_own_tokens(
    requests, lag, budget, num_blocks, slots, prefix_cache, treated, spoiling
):
    h = Harness(
        num_blocks=num_blocks,
        max_slots=slots,
        budget=budget,
        lag=lag,
        max_context=64,
        prefix_cache=prefix_cache,
        priorities=Priorities(treated),
    )
    h.executor.spoiling = spoiling
    waiting = sorted(enumerate(requests), key=lambda item: item[1][4])
    step = 0
    while waiting or h.scheduler.has_work or h.flight:
        while waiting and waiting[0][1][4] <= step:
            i, (family, length, max_tokens, priority, _, kind) = waiting.pop(0)
            prompt = [(family + position // (1 + family)) % VOCAB for position in range(length)]
            h.add(f"r{i}", prompt, max_tokens, priority, stream=kind == "stream")
            if kind == "abort":
                h.scheduler.abort(f"r{i}") if length % 2 else None
        h.step()
        for i, (_, _, _, _, at, kind) in enumerate(requests):
            if kind == "abort" and step == at + 5:
                h.scheduler.abort(f"r{i}")
        step += 1
        assert step < 4000, "the scheduler is stuck"
    h.run()
    assert len(h.completions) == len(requests)
    for i, (family, length, max_tokens, priority, _, kind) in enumerate(requests):
        completion = h.completions[f"r{i}"]
        assert h.sequences[f"r{i}"].displaced <= Priorities(treated)[priority].max_preemptions
        prompt = [(family + position // (1 + family)) % VOCAB for position in range(length)]
        reference = expected(prompt, min(max_tokens, h.limit - length), VOCAB)
        spoilt = spoiling.intersection([*prompt, *reference[:-1]])
        if spoilt and not spoiling.intersection(prompt):  # by its own answer
            reference = reference[: min(map(reference.index, spoilt)) + 1]
        elif spoilt:
            reference = []
        if completion.finish_reason is FinishReason.ABORT and completion.error is None:
            assert completion.token_ids == reference[: len(completion.token_ids)]
        else:
            assert completion.token_ids == reference
            assert (completion.error is not None) == bool(spoilt)
        if kind == "stream":
            assert h.streamed.get(f"r{i}", []) == completion.token_ids


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("length", [4, 7, 8, 9])
def test_nobody_finds_what_a_spoilt_sequence_computed_or_read(length, lag):
    h = Harness(lag=lag)
    prompt = list(range(length))
    h.add("long", [*prompt, 80], max_tokens=30)
    while h.sequences["long"].first_token_at is None:
        h.step()
    h.executor.spoiling = {90}  # for a moment, and never again
    h.add("spoilt", [*prompt, 90, 91, 92, 93], max_tokens=30)
    while "spoilt" not in h.completions:
        h.step()
    h.executor.spoiling = frozenset()
    assert h.completions["spoilt"].finish_reason is FinishReason.ABORT
    assert h.completions["spoilt"].error.code == "non_finite_values"
    h.add("same", [*prompt, 90, 91, 92, 93, 94], max_tokens=5)
    done = h.run()
    assert done["long"].token_ids == expected([*prompt, 80], 30, VOCAB)
    assert done["same"].token_ids == expected([*prompt, 90, 91, 92, 93, 94], 5, VOCAB)
    assert done["same"].cached_tokens == 0


def test_a_sequence_found_spoilt_once_it_was_pushed_back_leaves_nothing_to_find_either():
    h = Harness(lag=1)
    h.executor.spoiling = {90}
    h.add("spoilt", [*range(7), 90], max_tokens=30)
    h.step()
    h.scheduler._preempt(h.sequences["spoilt"])
    assert h.scheduler.pool.cached
    h.step()
    h.executor.spoiling = frozenset()
    h.add("same", [*range(7), 90, 91], max_tokens=5)
    done = h.run()
    assert done["spoilt"].error.code == "non_finite_values"
    assert done["same"].token_ids == expected([*range(7), 90, 91], 5, VOCAB)
    assert done["same"].cached_tokens == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("length", [8, 9, 14])
def test_a_sequence_put_back_goes_on_from_there_and_writes_to_no_block_that_others_may_find(length, lag):
    h = Harness(lag=lag)
    prompt = list(range(8))  # two whole blocks, known to the tree
    h.add("a", prompt, max_tokens=20)
    h.add("b", prompt, max_tokens=20)
    seq = h.sequences["a"]
    slot_of = None
    while slot_of is None or h.scheduler.slots.retired[slot_of] < 16:
        h.step()
        slot_of = seq.slot
    h.scheduler._put_back(seq, length)
    h.scheduler.check()
    # Position length - 1 is written next: of the prompt's last block at 8, of a block of its own from 9 on.
    assert seq.status is (SequenceStatus.WAITING if length == 8 else SequenceStatus.RUNNING)
    h.add("c", prompt, max_tokens=20)
    done = h.run()
    for name in "abc":
        assert done[name].token_ids == expected(prompt, 20, VOCAB)
