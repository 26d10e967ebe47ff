"""The host's half of the slot table: per-slot state as arrays, so that a step is a few array operations, not a loop."""

import mmap

import numpy as np
from numpy.typing import NDArray

from headrace.engine.request import Outputs
from headrace.engine.sequence import NOTHING, Sequence

MAX_STOP_IDS = 32


class Slots:
    """S slots, each empty or the home of one running sequence. Field names are those of the arrays.

    A token is *known* once it exists (sampled, perhaps not read back), *computed* once a scheduled step writes its KV,
    *retired* once the host has read it. The first ``prefill`` tokens were there when the sequence was seated.
    """

    def __init__(self, max_slots: int, max_context: int, block_size: int) -> None:
        max_blocks = -(-max_context // block_size)
        self.max_slots = max_slots
        self.block_size = block_size
        self.sequence: list[Sequence | None] = [None] * max_slots
        self.active = np.zeros(max_slots, dtype=bool)
        self.epoch = np.zeros(max_slots, dtype=np.int32)
        self.known = np.zeros(max_slots, dtype=np.int32)
        self.prefill = np.zeros(max_slots, dtype=np.int32)
        self.computed = np.zeros(max_slots, dtype=np.int32)
        self.retired = np.zeros(max_slots, dtype=np.int32)
        self.limit = np.zeros(max_slots, dtype=np.int32)
        self.in_flight = np.zeros(max_slots, dtype=np.int32)
        self.num_blocks = np.zeros(max_slots, dtype=np.int32)
        self.no_stop_before = np.zeros(max_slots, dtype=np.int32)
        self.stream = np.zeros(max_slots, dtype=bool)
        self.guided = np.zeros(max_slots, dtype=bool)
        self.unsampled = np.zeros(max_slots, dtype=bool)
        self.greedy = np.zeros(max_slots, dtype=bool)
        self.filtered = np.zeros(max_slots, dtype=bool)
        self.edited_before = np.zeros(max_slots, dtype=np.int32)
        self.logprobs = np.full(max_slots, -1, dtype=np.int32)
        self.need_from = np.full(max_slots, NOTHING, dtype=np.int32)
        self.generates = np.zeros(max_slots, dtype=bool)
        self.priority = np.zeros(max_slots, dtype=np.int32)
        self.deadline = np.zeros(max_slots, dtype=np.float64)
        self.displaceable = np.zeros(max_slots, dtype=bool)
        self.prompt_len = np.zeros(max_slots, dtype=np.int32)
        self.arrival = np.zeros(max_slots, dtype=np.int64)
        self.num_stop_ids = np.zeros(max_slots, dtype=np.int32)
        self.stop_ids = np.full((max_slots, MAX_STOP_IDS), -1, dtype=np.int32)
        self.block_tables = np.zeros((max_slots, max_blocks), dtype=np.int32)
        self.tokens = _sparse(
            max_slots, max_context + 1
        )  # a prompt to look at may fill the context: one beyond it
        self._free = list(range(max_slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Empty slots."""
        return len(self._free)

    @property
    def running(self) -> int:
        """Slots in use."""
        return self.max_slots - len(self._free)

    def seat(self, seq: Sequence, *, displaceable: bool) -> int:
        """Give a waiting sequence a slot and copy its state into the arrays; returns the slot.

        displaceable: whether a more urgent newcomer may push it back.
        """
        slot = self._free.pop()
        length = len(seq.tokens)
        params = seq.request.sampling
        self.sequence[slot] = seq
        self.active[slot] = True
        self.epoch[slot] += 1
        self.prefill[slot] = self.known[slot] = self.retired[slot] = length
        self.computed[slot] = 0
        self.in_flight[slot] = 0
        self.limit[slot] = seq.limit
        self.num_blocks[slot] = 0
        self.no_stop_before[slot] = seq.no_stop_before
        self.stream[slot] = seq.request.stream
        self.guided[slot] = seq.guide is not None
        self.unsampled[slot] = True
        self.greedy[slot] = params.temperature == 0
        filters = bool(params.top_k) or (params.top_p or 1.0) < 1.0 or bool(params.min_p)
        self.filtered[slot] = filters and not self.greedy[slot]
        self.edited_before[slot] = seq.edits.last_position if seq.edits else 0
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.priority[slot], self.deadline[slot], _ = seq.urgency
        self.prompt_len[slot] = seq.prompt_len
        self.displaceable[slot] = displaceable
        self.need_from[slot] = seq.need_from
        self.generates[slot] = seq.request.outputs is Outputs.TOKENS
        self.arrival[slot] = seq.arrival
        self.num_stop_ids[slot] = len(seq.stop_ids)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(seq.stop_ids)] = seq.stop_ids
        self.tokens[slot, :length] = seq.tokens
        seq.slot = slot
        return slot

    def rewind(self, slot: int, length: int) -> None:
        """Keep the first ``length`` tokens. The last of them is fed again, as a decode; what is in flight is nobody's."""
        self.epoch[slot] += 1
        self.known[slot] = self.retired[slot] = length
        self.computed[slot] = length - 1
        self.prefill[slot] = min(self.prefill[slot], length - 1)
        self.in_flight[slot] = 0

    def vacate(self, seq: Sequence) -> None:
        """Empty the sequence's slot; the tokens read back so far stay with it."""
        slot = seq.slot
        seq.tokens = self.tokens[slot, : self.retired[slot]].copy()
        seq.in_flight = int(self.in_flight[slot])
        seq.slot = -1
        self.sequence[slot] = None
        self.active[slot] = False
        self.epoch[slot] += 1
        self._free.append(slot)

    def blocks(self, slot: int) -> NDArray[np.int32]:
        """A view of the slot's blocks, in order of position."""
        return self.block_tables[slot, : self.num_blocks[slot]]


def _sparse(rows: int, columns: int) -> NDArray[np.int32]:
    """An int32 matrix of which few columns are ever used: its pages are made when first written, 4 KiB at a time.

    NumPy's own large arrays ask for huge pages, and a row would pay for clearing 2 MiB when its first token arrives.
    """
    memory = mmap.mmap(-1, rows * columns * 4)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32).reshape(rows, columns)
