"""Which running sequences share a long prefix, so that their decode rows can attend to it together. No torch."""

from typing import NamedTuple

import numpy as np

from headrace.engine.block_pool import BlockPool
from headrace.engine.plan import Ints
from headrace.engine.slots import Slots

LEAST_SHARERS, LEAST_SHARED_BLOCKS = 4, 8
"""Rows attend to a prefix together when at least so many share at least so many blocks."""

_NONE: Ints = np.empty(0, np.int32)


class Groups(NamedTuple):
    """Runs of rows with a prefix in common: [G] first row, number of rows, keys of the prefix."""

    start: Ints
    rows: Ints
    keys: Ints


NO_GROUPS = Groups(_NONE, _NONE, _NONE)


class Sharers:
    """Finds groups from the block tables; looks at them anew only after a sequence came or went."""

    def __init__(self, slots: Slots, pool: BlockPool) -> None:
        self._slots = slots
        self._pool = pool
        self._prefix_of = np.full(slots.max_slots, -1, np.int32)
        self._shared_blocks = np.zeros(slots.max_slots, np.int32)
        self._epochs = -1

    def group(self, decodes: Ints) -> tuple[Ints, Groups]:
        """The slots of ``decodes``, reordered so that sharers of a prefix stand together, and those runs."""
        if len(decodes) < LEAST_SHARERS:
            return decodes, NO_GROUPS
        epochs = int(self._slots.epoch.sum(dtype=np.int64))
        if epochs != self._epochs:
            self._epochs = epochs
            self._find()
        prefix = self._prefix_of[decodes]
        if (prefix == -1).all():
            return decodes, NO_GROUPS
        order = np.argsort(prefix, kind="stable")
        decodes, prefix = decodes[order], prefix[order]
        start: Ints = np.flatnonzero(np.diff(prefix, prepend=-1)).astype(np.int32)
        rows: Ints = np.diff(start, append=len(decodes)).astype(np.int32)
        many = rows >= LEAST_SHARERS
        start, rows = start[many], rows[many]
        keys: Ints = self._shared_blocks[decodes[start]] * np.int32(self._slots.block_size)
        return decodes, Groups(start, rows, keys)

    def _find(self) -> None:
        """Name each sequence's prefix by the last block that enough others hold too.

        A block that n sequences hold is their common prefix up to it, so the counts of references along a table say
        how far it is shared. A private copy of a known block ends the run: what follows it is not the same chain.
        """
        s = self._slots
        self._prefix_of[:] = -1
        held_by_many = self._pool.references() >= LEAST_SHARERS
        rows = np.flatnonzero(s.active & (s.num_blocks >= LEAST_SHARED_BLOCKS))
        if len(rows):  # most workloads share nothing: one column of the tables tells
            rows = rows[held_by_many[s.block_tables[rows, LEAST_SHARED_BLOCKS - 1]]]
        if not len(rows):
            return
        longest, width = int(s.num_blocks[rows].max()), 4 * LEAST_SHARED_BLOCKS
        # A long table among many that share little is not worth looking through to its end.
        while held_by_many[s.block_tables[rows, :width]].all(1).any() and width < longest:
            width *= 2
        tables = s.block_tables[rows, : min(width, longest)]
        shared = held_by_many[tables]
        run = np.where(shared.all(1), shared.shape[1], shared.argmin(1))  # argmin: the first that is not
        depth = np.minimum(run, s.num_blocks[rows])
        last = tables[np.arange(len(rows)), depth - 1]
        self._prefix_of[rows] = np.where(depth >= LEAST_SHARED_BLOCKS, last, -1)
        self._shared_blocks[rows] = depth
