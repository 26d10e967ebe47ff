"""CUDA graphs of decode steps: one launch instead of hundreds, for every batch size that occurs.

A step of R rows replays the smallest graph of at least R rows; the rows beyond are padding (slot -1, no keys). Graphs are
captured largest first and share one memory pool, so that they cost what the largest needs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine.plan import StepPlan
from headrace.engine.runner import ModelRunner, StepShape

FIELDS = 6  # slots, starts, token ids, and the block table's updates: slots, index, blocks


def graph_sizes(largest: int) -> list[int]:
    """Row counts worth a graph: padding stays within a third below 64 rows, within a quarter to 512, then within 128."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += [*range(320, 513, 64), *range(640, largest + 128, 128)]
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    lines: Tensor
    positions: Tensor


class GraphCache:
    """Captured decode steps by their number of rows."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.sizes = graph_sizes(runner.max_slots)
        self.replays = 0
        self._size_of = np.searchsorted(self.sizes, np.arange(runner.max_slots + 1))
        self._inputs = torch.zeros(FIELDS * runner.max_slots, dtype=torch.int32, device=runner.device)
        self._query_start = torch.arange(runner.max_slots + 1, dtype=torch.int32, device=runner.device)
        self._captured: dict[int, _Captured] = {}

    def capture(self) -> None:
        """Capture every size, largest first. A first, plain run lets every kernel compile and set itself up."""
        pool = None
        for size in reversed(self.sizes):
            self._load(np.full(size, -1, np.int32), *(np.zeros(size, np.int32) for _ in range(5)))
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits, lines, positions = self._step(size)
            pool = pool or graph.pool()
            self._captured[size] = _Captured(graph, logits, lines, positions)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is a decode step, each row of which samples."""
        return (
            len(plan.slots) == plan.num_decodes == len(plan.sample_rows)
            and len(plan.table_slots) <= plan.num_decodes
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """As ModelRunner.run, for a plan that fits."""
        runner, rows = self.runner, len(plan.slots)
        runner.update_sampling(plan.sampling)
        size = self.sizes[self._size_of[rows]]
        updates = (plan.table_slots, plan.table_index, plan.table_blocks)
        spare = (runner.max_slots, 0, 0)
        self._load(
            _padded(plan.slots, size, -1), _padded(plan.starts, size, 0), _padded(plan.token_ids, size, 0),
            *(_padded(array, size, fill) for array, fill in zip(updates, spare, strict=True)),
        )  # fmt: skip
        captured = self._captured[size]
        captured.graph.replay()
        self.replays += 1
        return runner.sample(captured.logits[:rows], captured.lines[:rows], captured.positions[:rows], plan)

    def _load(self, *fields: np.ndarray) -> None:
        self.runner.staging.upload_into(self._inputs, np.concatenate(fields))

    def _step(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a graph holds: logits [size, V], the rows' lines of the slot table, the positions they sample."""
        runner = self.runner
        slots, starts, token_ids, table_slots, index, blocks = self._inputs[: FIELDS * size].view(
            FIELDS, size
        )
        runner.block_tables[table_slots.long(), index.long()] = blocks
        padding = slots < 0
        context_lens = torch.where(padding, 0, starts + 1).int()
        hidden = runner.forward(
            token_ids, self._query_start[: size + 1], slots, starts, context_lens,
            StepShape(num_decodes=size, max_query_len=1, max_context_len=runner.max_context),
        )  # fmt: skip
        lines = torch.where(padding, runner.max_slots, slots).long()
        return runner.model.logits(hidden), lines, context_lens.long()


def _padded(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(array)] = array
    return out
