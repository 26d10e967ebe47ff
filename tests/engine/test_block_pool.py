"""The block pool: no block lost, none in two places, parents outlive children."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.block_pool import BlockPool
from headrace.engine.prefix_tree import PrefixTree

EVERYWHERE = 1 << 30
"""A bound that bounds nothing: all of a prompt may come from the cache."""


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_eviction_takes_leaves_before_parents_and_the_least_recently_used_first():
    tree = PrefixTree(block_size=2)
    pool = BlockPool(4, tree)
    chain = pool.take(3)
    tree.insert(tree.root(""), tokens(0, 0, 1, 1, 2, 2), chain.tolist(), ready=True)
    pool.release(chain)
    assert (pool.free, pool.cached) == (1, 3)
    pool.take(2)
    assert len(tree.match("", tokens(0, 0, 1, 1, 2, 2, 9), EVERYWHERE).blocks) == 2
    pool.take(1)
    assert len(tree.match("", tokens(0, 0, 1, 1, 2, 2, 9), EVERYWHERE).blocks) == 1


def test_a_match_never_covers_the_last_token():
    tree = PrefixTree(block_size=2)
    tree.insert(tree.root(""), tokens(1, 2), [0], ready=True)
    assert tree.match("", tokens(1, 2), EVERYWHERE).blocks == []
    assert tree.match("", tokens(1, 2, 3), EVERYWHERE).blocks == [0]


def test_blocks_with_the_same_tokens_after_different_prefixes_are_different():
    tree = PrefixTree(block_size=1)
    tree.insert(tree.root(""), tokens(1, 7), [0, 2], ready=True)
    tree.insert(tree.root(""), tokens(2, 7), [1, 3], ready=True)
    assert tree.match("", tokens(1, 7, 0), EVERYWHERE).blocks == [0, 2]
    assert tree.match("", tokens(2, 7, 0), EVERYWHERE).blocks == [1, 3]


def test_a_block_that_is_still_being_filled_is_worth_waiting_for_but_not_read():
    tree = PrefixTree(block_size=1)
    (node,), _ = tree.insert(tree.root(""), tokens(1), [0], ready=False)
    match = tree.match("", tokens(1, 2), EVERYWHERE)
    assert (match.blocks, match.pending) == ([], True)
    node.ready = True
    assert tree.match("", tokens(1, 2), EVERYWHERE).blocks == [0]


def test_of_two_blocks_with_the_same_tokens_the_first_stays_the_one_to_be_found():
    tree = PrefixTree(block_size=1)
    (first,), _ = tree.insert(tree.root(""), tokens(1), [0], ready=True)
    (again, longer), last = tree.insert(tree.root(""), tokens(1, 2), [5, 6], ready=True)
    assert again is None
    assert (longer.block, longer.number) == (6, last)
    assert tree.match("", tokens(1, 2, 3), EVERYWHERE).blocks == [first.block, 6]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=40))
def test_every_block_is_free_cached_or_live_whatever_is_taken_shared_and_released(actions):
    tree = PrefixTree(block_size=1)
    pool = BlockPool(12, tree)
    held: list[np.ndarray] = []
    for length, family, let_go in actions:
        prompt = np.arange(length + 1, dtype=np.int32) + 100 * family
        match = tree.match("", prompt, EVERYWHERE)
        need = length - len(match.blocks)
        shared = np.array(match.blocks, np.int32)
        if need + pool.cached_among(shared) <= pool.available:
            pool.share(shared)
            blocks = np.concatenate([shared, pool.take(need)])
            known = len(match.blocks)
            tree.insert(match.parent, prompt[known:length], blocks[known:].tolist(), ready=True)
            held.append(blocks)
        if let_go and held:
            pool.release(held.pop(0))
        pool.check()
        assert pool.free + pool.cached + pool.live == 12
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.live == 0
