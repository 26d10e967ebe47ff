"""Groups of rows that share a prefix, read off the block tables."""

import numpy as np
import pytest

from headrace.engine.block_pool import BlockPool
from headrace.engine.prefix_tree import PrefixTree
from headrace.engine.request import Request
from headrace.engine.sequence import Sequence
from headrace.engine.sharers import Sharers
from headrace.engine.slots import Slots

BLOCK = 4


def seated(tables):
    """Slots and a pool in which sequence i has the blocks tables[i]."""
    slots = Slots(max_slots=16, max_context=2048, block_size=BLOCK)
    pool = BlockPool(512, PrefixTree(BLOCK))
    for i, table in enumerate(tables):
        prompt = np.zeros(BLOCK * len(table), np.int32)
        seq = Sequence(
            request=Request(str(i), prompt.tolist()),
            arrival=i,
            limit=2000,
            seed=0,
            added_at=0.0,
            tokens=prompt,
        )
        slot = slots.seat(seq, displaceable=True)
        slots.block_tables[slot, : len(table)] = table
        slots.num_blocks[slot] = len(table)
        for block in table:
            pool.references()[block] += 1
    return slots, pool


@pytest.mark.parametrize("common", [8, 31, 32, 33, 64, 100, 200])
def test_a_group_is_found_however_long_its_prefix_and_whoever_else_is_long(common):
    shared = list(range(1, common + 1))
    tables = [[*shared, 300 + i, 310 + i] for i in range(5)]
    tables += [list(range(320, 327)), [*range(330, 510)]]  # a short one, and a long one that shares nothing
    slots, pool = seated(tables)
    order, groups = Sharers(slots, pool).group(np.arange(7, dtype=np.int32))
    (start,), (rows,), (keys,) = groups
    assert sorted(order[start : start + rows]) == [0, 1, 2, 3, 4]
    assert keys == common * BLOCK


def test_rows_that_share_all_their_blocks_are_a_group_up_to_the_shortest():
    slots, pool = seated([list(range(1, 51))] * 4)
    _, groups = Sharers(slots, pool).group(np.arange(4, dtype=np.int32))
    assert [array.tolist() for array in groups] == [[0], [4], [50 * BLOCK]]
