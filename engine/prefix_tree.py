"""Which block holds which tokens after which prefix: a trie whose edges are whole blocks of token ids.

A node is found by its parent's node and the exact bytes of its tokens, so a hit needs no hash to be trusted. Node
numbers are never used twice: a child whose parent was evicted can no longer be reached, and a new parent with the same
tokens starts a branch of its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, bytes]


@dataclass(slots=True)
class Node:
    """One full block of tokens. ``ready``: a step that fills the block has been scheduled."""

    number: int
    block: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can reuse. ``pending``: the next block is being filled by a running sequence: worth waiting for."""

    blocks: list[int]
    parent: int
    pending: bool


class PrefixTree:
    """Full blocks by prefix. Knows nothing of reference counts; the block pool tells it what to forget."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[Key, Node] = {}
        self._key_of_block: dict[int, Key] = {}
        self._roots: dict[str, int] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of_block

    def root(self, salt: str) -> int:
        """Where prompts with this salt begin; different salts never share."""
        if salt not in self._roots:
            self._roots[salt] = self._number()
        return self._roots[salt]

    def match(self, salt: str, tokens: NDArray[np.int32], need_from: int) -> Match:
        """The longest run of ready blocks that hold a prefix of ``tokens`` and end at ``need_from`` or before.

        The last token is always computed, because its logits are wanted; the cap keeps to whole blocks because a
        shared block is never written.
        """
        parent = self.root(salt)
        blocks: list[int] = []
        nodes, data, width = self._nodes, tokens.tobytes(), tokens.itemsize * self.block_size
        whole = min(need_from, len(tokens) - 1) // self.block_size
        for start in range(0, whole * width, width):
            node = nodes.get((parent, data[start : start + width]))
            if node is None:
                break
            if not node.ready:
                return Match(blocks, parent, pending=True)
            blocks.append(node.block)
            parent = node.number
        return Match(blocks, parent, pending=False)

    def insert(
        self, parent: int, tokens: NDArray[np.int32], blocks: list[int], *, ready: bool
    ) -> tuple[list[Node | None], int]:
        """Make a run of full blocks findable: ``tokens``, as many as they hold, stand after ``parent``.

        Returns their nodes and the number of the last one. None in the place of a block whose tokens another block has
        already: that one stays the one to be found.
        """
        made: list[Node | None] = []
        nodes, data, width = self._nodes, tokens.tobytes(), tokens.itemsize * self.block_size
        for i, block in enumerate(blocks):
            key = (parent, data[i * width : (i + 1) * width])
            node = nodes.get(key)
            if node is None:
                node = nodes[key] = Node(self._number(), block, ready)
                self._key_of_block[block] = key
                made.append(node)
            else:
                made.append(None)
            parent = node.number
        return made, parent

    def forget(self, block: int) -> None:
        """The block is about to hold something else (or was never filled)."""
        del self._nodes[self._key_of_block.pop(block)]

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number
