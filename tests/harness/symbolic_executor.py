"""An executor whose "keys and values" say which tokens they stand for, so that a wrong block is seen at once.

The entry for a position is a hash of every token up to it. A row is checked to find exactly its own history in the blocks
of its table; its next token is a function of that history alone, as a real model's greedy token would be.
"""

from collections import deque

import numpy as np

from headrace.engine.plan import StepPlan

EMPTY = -1
SPOILT = -2


def extend(history: int, token: int) -> int:
    """The entry for a token after a history (both as in the cache)."""
    return hash((history, int(token))) & 0x7FFFFFFF


def history_of(tokens) -> int:
    """The entry of the last of ``tokens``."""
    history = 0
    for token in tokens:
        history = extend(history, token)
    return history


def next_token(history: int, vocab: int) -> int:
    """What the model says after this history."""
    return (history >> 3) % vocab


def expected(prompt, count: int, vocab: int, stop=()) -> list[int]:
    """Greedy output for a prompt when nothing else exists."""
    history, out = history_of(prompt), []
    for _ in range(count):
        token = next_token(history, vocab)
        if token in stop:
            break
        out.append(token)
        history = extend(history, token)
    return out


class SymbolicExecutor:
    """Runs plans against symbolic blocks; ``submit`` returns the tokens, the caller decides when to look at them.

    spoiling: tokens for which the model computes no finite numbers. Whatever attends to one is spoilt and chooses no token.
    """

    def __init__(self, num_blocks: int, block_size: int, max_slots: int, max_blocks: int, vocab: int) -> None:
        self.cache = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.tables = np.zeros((max_slots, max_blocks), np.int32)
        self.last = np.zeros(max_slots, np.int64)
        self.vocab = vocab
        self.block_size = block_size
        self.rows_seen: deque[int] = deque(maxlen=1000)
        self.groups_seen: list[int] = []
        self.spoiling: frozenset[int] = frozenset()

    def submit(self, plan: StepPlan) -> np.ndarray:
        assert plan.num_tokens == plan.query_lens.sum()
        assert (plan.query_lens[: plan.num_decodes] == 1).all()
        # A GPU sets them in no particular order.
        assert len(set(zip(plan.table_slots, plan.table_index, strict=True))) == len(plan.table_slots)
        assert len(set(plan.sampling.slots)) == len(plan.sampling.slots)
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot stands in two rows"
        self.tables[plan.table_slots, plan.table_index] = plan.table_blocks
        self._check_groups(plan)
        self.rows_seen.append(len(plan.slots))
        offsets = np.concatenate([[0], np.cumsum(plan.query_lens)])
        inputs = []
        for r, slot in enumerate(plan.slots.tolist()):
            ids = plan.token_ids[offsets[r] : offsets[r + 1]].astype(np.int64)
            inputs.append(np.where(ids == -1, max(self.last[slot], 0), ids))
            positions = plan.starts[r] + np.arange(
                plan.query_lens[r]
            )  # what stood here before is overwritten
            self.cache[self.tables[slot, positions // self.block_size], positions % self.block_size] = EMPTY
        # As on the device: each position's entry depends on its predecessor, written earlier or in this very step.
        # Rows whose predecessor another row of this step writes wait for it.
        pending = deque(range(len(plan.slots)))
        done: dict[int, int] = {}
        stuck = 0
        while pending:
            r = pending.popleft()
            result = self._row(plan, r, inputs[r])
            if result is None:
                pending.append(r)
                stuck += 1
                assert stuck <= len(pending) + 1, "a row attends to blocks that nobody has filled"
                continue
            done[r] = result
            stuck = 0
        histories = [done[r] for r in plan.sample_rows.tolist()]
        tokens = np.array([-1 if h == SPOILT else next_token(h, self.vocab) for h in histories], np.int64)
        self.last[plan.slots[plan.sample_rows]] = tokens
        return tokens

    def _check_groups(self, plan: StepPlan) -> None:
        """Rows of a group are decodes, stand in one group alone, and hold the same blocks as far as it says."""
        taken = np.zeros(plan.num_decodes, bool)
        groups = zip(
            plan.group_start.tolist(), plan.group_rows.tolist(), plan.group_keys.tolist(), strict=True
        )
        for start, rows, keys in groups:
            assert rows > 1
            assert keys > 0
            assert keys % self.block_size == 0
            assert not taken[start : start + rows].any()
            taken[start : start + rows] = True
            tables = self.tables[plan.slots[start : start + rows], : keys // self.block_size]
            assert (tables == tables[0]).all()
            assert (plan.starts[start : start + rows] >= keys).all()
            self.groups_seen.append(rows)

    def _row(self, plan: StepPlan, r: int, ids: np.ndarray) -> int | None:
        start, slot = int(plan.starts[r]), int(plan.slots[r])
        history = 0
        if start:
            history = int(self._entry(slot, start - 1))
            if history == EMPTY:
                return None
        for i, token in enumerate(ids.tolist()):
            spoilt = history == SPOILT or token in self.spoiling
            history = SPOILT if spoilt else extend(history, token)
            position = start + i
            self.cache[self.tables[slot, position // self.block_size], position % self.block_size] = history
        return history

    def _entry(self, slot: int, position: int) -> int:
        return self.cache[self.tables[slot, position // self.block_size], position % self.block_size]
