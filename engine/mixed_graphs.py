"""CUDA graphs of small mixed steps: a few prompts beside the rows that decode, where launches would take longer than the work.

A step replays the smallest graph that has room for its decode rows and for its prefill tokens. The decode rows beyond are
padding (slot -1, no keys), the prefill rows beyond are empty, and the tokens beyond belong to no row. Larger mixed steps
mostly keep the device busy for longer than it takes to launch their kernels one by one (on a slow host a small model's do
not), and padding them would cost more than it saves. Rows that share a prefix each read it for themselves here, which is
right too, and quicker as long as it is little.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.engine.capture import record
from headrace.engine.plan import Ints, StepPlan
from headrace.engine.runner import ModelRunner, Sampled, StepShape

DECODES = (0, 16, 64, 128, 256, 512)
PREFILL_TOKENS = (64, 256, 512)
PREFILL_ROWS = 32

REREAD_BYTES = 1 << 29
"""Of keys and values of shared prefixes that rows may read again, in a layer: 0.12 ms at an H200's bandwidth, and 0.5 ms at
a TB/s. Launching a layer's kernels one by one takes 0.4 ms and more."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """hidden: [decodes + tokens, H], for as many of both as the graph has room for. A replay writes it."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class MixedGraphs:
    """Captured mixed steps by their decode rows and their prefill tokens. All are captured before the first request."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._decodes = [size for size in DECODES if size <= runner.max_slots]
        self._inputs = torch.zeros(
            _words(self._decodes[-1], PREFILL_TOKENS[-1]), dtype=torch.int32, device=runner.device
        )
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._most_shared_keys = REREAD_BYTES // runner.kv.layer_token_bytes

    def capture_all(self, pool: Any) -> None:
        """Capture every size, largest first, into a memory pool that graphs share."""
        for decodes in reversed(self._decodes):
            for tokens in reversed(PREFILL_TOKENS):
                self._captured[decodes, tokens] = self._capture(decodes, tokens, pool)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is a small mixed step whose rows share little and are not read off."""
        prefills, tokens = len(plan.slots) - plan.num_decodes, plan.num_tokens - plan.num_decodes
        return (
            0 < prefills <= PREFILL_ROWS
            and tokens <= PREFILL_TOKENS[-1]
            and plan.num_decodes <= self._decodes[-1]
            and plan.shared_keys <= self._most_shared_keys
            and not plan.readings
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """As ModelRunner.run, for a plan that fits."""
        n = plan.num_decodes
        decodes = self._decodes[bisect_left(self._decodes, n)]
        tokens = PREFILL_TOKENS[bisect_left(PREFILL_TOKENS, plan.num_tokens - n)]
        captured = self._captured[decodes, tokens]
        self.runner.update(plan)
        self.runner.staging.upload_into(self._inputs, _padded(plan, decodes, tokens))
        captured.graph.replay()
        last = np.cumsum(plan.query_lens, dtype=np.int32)[plan.sample_rows] - 1
        last[plan.sample_rows >= n] += decodes - n
        return self.runner.finish(captured.hidden, last, plan)

    @torch.inference_mode()
    def _capture(self, decodes: int, tokens: int, pool: Any) -> _Captured:
        self._inputs.zero_()
        self._inputs[: decodes + PREFILL_ROWS] = -1  # the slots: padding alone
        graph, hidden = record(lambda: self._step(decodes, tokens), pool)
        return _Captured(graph, hidden)

    def _step(self, decodes: int, tokens: int) -> Tensor:
        """What a graph holds. Its inputs lie in the order of ``_padded``."""
        rows = decodes + PREFILL_ROWS
        parts = torch.split(
            self._inputs[: _words(decodes, tokens)], [rows, rows, rows, rows + 1, decodes + tokens]
        )
        slots, starts, context_lens, query_start, token_ids = parts
        shape = StepShape(num_decodes=decodes, max_context_len=self.runner.max_context)
        return self.runner.forward(token_ids, query_start, slots, starts, context_lens, shape, None)


def _words(decodes: int, tokens: int) -> int:
    """How many words ``_padded`` has."""
    return 4 * (decodes + PREFILL_ROWS) + 1 + decodes + tokens


def _padded(plan: StepPlan, decodes: int, tokens: int) -> Ints:
    """A plan's slots, starts, context_lens [rows], query_start [rows + 1] and token_ids, where a graph looks for them.

    rows: decodes + PREFILL_ROWS. The plan's decode rows come first, its prefill rows from number ``decodes`` on; their
    tokens likewise.
    """
    n = plan.num_decodes

    def spread(values: Ints, size: int, fill: int) -> Ints:
        out = np.full(size, fill, np.int32)
        out[:n] = values[:n]
        out[decodes : decodes + len(values) - n] = values[n:]
        return out

    rows = decodes + PREFILL_ROWS
    slots, starts = spread(plan.slots, rows, -1), spread(plan.starts, rows, 0)
    context_lens = spread(plan.starts + plan.query_lens, rows, 0)
    query_lens = spread(plan.query_lens, rows, 0)
    query_lens[:decodes] = 1  # a padding row among them has a token too
    query_start = np.zeros(rows + 1, np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    token_ids = spread(plan.token_ids, decodes + tokens, 0)
    return np.concatenate((slots, starts, context_lens, query_start, token_ids))
