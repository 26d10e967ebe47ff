"""Who makes way for a more urgent newcomer.

Only sequences of strictly lower priority that have not been pushed back too often, and only if the newcomer fits
afterwards: nobody is recomputed for nothing. The lowest priority goes first, of it the one with the most time to its
deadline, of those the one that has generated least.
"""

import numpy as np

from headrace.engine.block_pool import BlockPool
from headrace.engine.plan import Ints
from headrace.engine.sequence import Sequence
from headrace.engine.slots import Slots


def victims(slots: Slots, pool: BlockPool, priority: int, missing: int, shared: Ints) -> list[Sequence]:
    """The running sequences to push back for a newcomer; none if it would not fit even then.

    missing: blocks that it lacks; 0 or less where it lacks a slot alone, and one sequence leaves. shared: [n] blocks that
    it reads anyway, so that their letting go of these gains nothing.
    """
    rows = np.flatnonzero(slots.active & slots.displaceable & (slots.priority > priority))
    if not len(rows) or slots.num_blocks[rows].sum() < missing:
        return []
    generated = slots.known[rows] - slots.prompt_len[rows]
    order = np.lexsort((-slots.arrival[rows], generated, -slots.deadline[rows], -slots.priority[rows]))
    chosen, spare = [], -missing
    for row in rows[order].tolist():
        gain = pool.sole(np.setdiff1d(slots.blocks(row), shared))
        chosen.append((row, gain))
        spare += gain
        if spare >= 0:
            return [_at(slots, row) for row in _needed(chosen, spare)]
    return []


def _needed(chosen: list[tuple[int, int]], spare: int) -> list[int]:
    """The slots chosen, less those whose gain is to spare; the last one is needed in any case."""
    *early, (last, _) = chosen
    needed = []
    for row, gain in early:
        if gain <= spare:
            spare -= gain
        else:
            needed.append(row)
    return [*needed, last]


def _at(slots: Slots, row: int) -> Sequence:
    seq = slots.sequence[row]
    assert seq is not None, "an empty slot is active"
    return seq
