"""CUDA graphs of steps: one launch instead of hundreds, for every decode batch that occurs and for small mixed steps.

A step of R rows replays the graph of at least R rows that was quickest on padding alone, mostly the smallest; the rows
beyond are padding (slot -1, no keys). Graphs are captured largest first and share one memory pool, so that they cost
what the largest needs. Mixed steps: mixed_graphs.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.engine.capture import record, seconds_of
from headrace.engine.mixed_graphs import MixedGraphs
from headrace.engine.plan import Ints, StepPlan
from headrace.engine.prefix_tiles import most_tiles, prefix_tiles
from headrace.engine.runner import ModelRunner, Sampled, StepShape
from headrace.kernels.shared_prefix import SharedPrefixes

CLEARLY = 0.95
"""A larger graph is taken for this share of a smaller one's time, or less: what one measurement can tell."""

SHARED_BYTES = 1 << 25
"""Of keys and values of shared prefixes that rows would read again, in a layer, from which on a kernel reads them for all
rows: it takes some 5 us to start and to end, and an H200 8 us to read so much."""

# A row: slot, start, token id; a block-table update: slot, index, block; the length of the prefix it shares.
_ROW_FIELDS = 7
# A tile of rows that share a prefix: start, rows, keys. Their number stands before them.
_TILE_FIELDS = 3


def graph_sizes(largest: int) -> list[int]:
    """Row counts worth a graph: padding stays within a third below 64 rows, then within 64 rows."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 64, 64)
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    lines: Tensor
    positions: Tensor


class GraphCache:
    """Captured decode steps by their number of rows, and by whether rows share prefixes.

    All are captured before the first request. mixed: those of mixed steps.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.sizes = graph_sizes(runner.max_slots)
        self.replays = 0
        largest = runner.max_slots
        self._size_of = np.searchsorted(self.sizes, np.arange(largest + 1))
        self._inputs = torch.zeros(self._words(largest), dtype=torch.int32, device=runner.device)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=runner.device)
        self._pool: Any = None
        self.mixed = MixedGraphs(runner)
        self._least_shared_keys = max(SHARED_BYTES // runner.kv.layer_token_bytes, 1)
        self._captured: dict[tuple[int, bool], _Captured] = {}

    def capture_all(self) -> None:
        """Capture every size, largest first, and see which is the quickest for each number of rows.

        A library takes nearly twice as long for some numbers of rows as for a few more: on an H200, cuBLAS for llama3-8b's
        gate_up 269 us at 448 rows and 155 at 512.
        """
        invariant = self.runner.model.numerics.batch_invariant
        quickest, least = list(range(len(self.sizes))), float("inf")
        for i, size in reversed(list(enumerate(self.sizes))):
            self._captured[size, False] = self._capture(size, shared=False)
            seconds = seconds_of(self._captured[size, False].graph)
            if least < CLEARLY * seconds:
                quickest[i] = quickest[i + 1]
            else:
                least = seconds
            if not invariant and self._most_tiles(size):
                self._captured[size, True] = self._capture(size, shared=True)
        self._size_of = np.array(quickest)[self._size_of]
        self.mixed.capture_all(self._pool)

    @torch.inference_mode()
    def _capture(self, size: int, *, shared: bool) -> _Captured:
        """Record a step of ``size`` padding rows."""
        nothing = np.empty(0, np.int32)
        self._load(size, [nothing] * _ROW_FIELDS, np.zeros(1, np.int32), [nothing] * _TILE_FIELDS)
        graph, outputs = record(lambda: self._step(size, shared), self._pool)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, *outputs)

    def fits(self, plan: StepPlan) -> bool:
        """Whether there is a graph for the plan."""
        return self._decodes_alone(plan) or self.mixed.fits(plan)

    def _decodes_alone(self, plan: StepPlan) -> bool:
        """Whether every row decodes, samples and does nothing else."""
        return (
            len(plan.slots) == plan.num_decodes == len(plan.sample_rows)
            and len(plan.table_slots) <= plan.num_decodes
            and not plan.readings
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """As ModelRunner.run, for a plan that fits."""
        self.replays += 1
        return self._decode(plan) if self._decodes_alone(plan) else self.mixed.run(plan)

    def _decode(self, plan: StepPlan) -> Sampled:
        runner, rows = self.runner, len(plan.slots)
        runner.update_sampling(plan.sampling)
        size = self.sizes[self._size_of[rows]]
        shared = plan.shared_keys >= self._least_shared_keys
        captured = self._captured[size, shared]
        prefix_lens, num_tiles, *tiles = prefix_tiles(plan, runner.rows_per_tile)
        updates = [plan.table_slots, plan.table_index, plan.table_blocks]
        self._load(size, [plan.slots, plan.starts, plan.token_ids, *updates, prefix_lens], num_tiles, tiles)
        captured.graph.replay()
        logits = runner.model.logits(captured.hidden[:rows])
        return runner.sample(logits, captured.lines[:rows], captured.positions[:rows], plan)

    def _most_tiles(self, size: int) -> int:
        """Tiles of shared prefixes that a graph of ``size`` rows has room for: as many as there can be."""
        return most_tiles(size, self.runner.rows_per_tile)

    def _words(self, size: int) -> int:
        return _ROW_FIELDS * size + 1 + _TILE_FIELDS * self._most_tiles(size)

    def _load(self, size: int, row_fields: list[Ints], num_tiles: Ints, tile_fields: list[Ints]) -> None:
        """Send a step's inputs. Padding rows have slot -1; padding updates go to the slot table's spare line."""
        padding = (-1, 0, 0, self.runner.max_slots, 0, 0, 0)
        rows = [_padded(field, size, fill) for field, fill in zip(row_fields, padding, strict=True)]
        tiles = [_padded(field, self._most_tiles(size), 0) for field in tile_fields]
        self.runner.staging.upload_into(self._inputs, np.concatenate([*rows, num_tiles, *tiles]))

    def _step(self, size: int, with_shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """What a graph holds: hidden states [size, H], the rows' lines of the slot table, the positions they sample.

        The logits come after it: they are wanted of real rows only, and a graph keeps what it returns for ever.
        """
        runner, rows = self.runner, _ROW_FIELDS * size
        slots, starts, token_ids, table_slots, index, blocks, lens = self._inputs[:rows].view(
            _ROW_FIELDS, size
        )
        num_tiles = self._inputs[rows : rows + 1]
        tiles = self._inputs[rows + 1 : self._words(size)].view(_TILE_FIELDS, self._most_tiles(size))
        runner.block_tables[table_slots.long(), index.long()] = blocks
        padding = slots < 0
        context_lens = torch.where(padding, 0, starts + 1).int()
        hidden = runner.forward(
            token_ids, self._query_start[: size + 1], slots, starts, context_lens,
            StepShape(num_decodes=size, max_context_len=runner.max_context),
            SharedPrefixes(lens, num_tiles, *tiles) if with_shared else None,
        )  # fmt: skip
        lines = torch.where(padding, runner.max_slots, slots).long()
        return hidden, lines, context_lens.long()


def _padded(array: Ints, size: int, fill: int) -> Ints:
    out = np.full(size, fill, np.int32)
    out[: len(array)] = array
    return out
