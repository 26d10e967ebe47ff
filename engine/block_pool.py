"""The KV cache's blocks: who may write where. No torch, no sequences; numbers of blocks alone.

A block is free (holds nothing), live (some sequence counts on it) or cached (nobody does, but the prefix tree can still
find it). Idle invariant: free + cached + live = total. A released block may still be written by a step that is
already launched; that is harmless, because its next owner's writes come later on the same stream and a block that the
prefix tree knows is full, so no overshoot can land in it.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.engine.prefix_tree import PrefixTree


class BlockPool:
    """Counts references, hands out free blocks, evicts cached ones: least recently used first, leaves before parents."""

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        self.num_blocks = num_blocks
        self._tree = tree
        self._refs = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that only the prefix tree remembers."""
        return len(self._cached)

    @property
    def live(self) -> int:
        """Blocks that at least one sequence counts on."""
        return int(np.count_nonzero(self._refs))

    @property
    def available(self) -> int:
        """Blocks that ``take`` could hand out."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> NDArray[np.int32]:
        """``count`` blocks of one's own. The caller has looked at ``available``."""
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            self._tree.forget(block)
            self._free.append(block)
        first = len(self._free) - count
        blocks = np.array(self._free[first:], np.int32)
        del self._free[first:]
        self._refs[blocks] = 1
        return blocks

    def share(self, blocks: NDArray[np.int32]) -> None:
        """Count one more reader on each of these (distinct) blocks."""
        for block in blocks[self._refs[blocks] == 0].tolist():
            del self._cached[block]
        self._refs[blocks] += 1

    def references(self) -> NDArray[np.int32]:
        """[num_blocks] readers of each block; a view, to be read only."""
        return self._refs

    def cached_among(self, blocks: NDArray[np.int32]) -> int:
        """How many of these blocks ``share`` would take out of ``available``."""
        return int(np.count_nonzero(self._refs[blocks] == 0))

    def sole(self, blocks: NDArray[np.int32]) -> int:
        """How many of these blocks would become available if their one reader let go."""
        return int(np.count_nonzero(self._refs[blocks] == 1))

    def release(self, blocks: NDArray[np.int32]) -> None:
        """One reader lets go of a sequence's blocks, given in order of position.

        They are queued for eviction last block first, so that a parent always outlives its children.
        """
        self._refs[blocks] -= 1
        for block in blocks[self._refs[blocks] == 0][::-1].tolist():
            if block in self._tree:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Let the prefix tree find these blocks of its no more, and free those that nobody counts on."""
        for block in blocks:
            self._tree.forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def check(self) -> None:
        """Assert the idle invariant and that no block is in two places."""
        free = set(self._free)
        cached = set(self._cached)
        live = set(np.flatnonzero(self._refs).tolist())
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free | cached | live) == len(free) + len(cached) + len(live), "a block is in two states"
        assert len(free) + len(cached) + len(live) == self.num_blocks, "a block is lost"
        assert all(block in self._tree for block in cached), "a cached block cannot be found"
        assert (self._refs >= 0).all(), "a block was released twice"
