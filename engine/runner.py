"""Runs steps on the device: the device's half of the slot table, forward, sampling.

The host sends what changed (block-table entries, sampling parameters of new sequences) and the step's shape; what a
decode feeds on (its slot's last token) never leaves the device.
"""

import torch
from torch import Tensor

from headrace.engine.kv_cache import KVCache, StepContext
from headrace.engine.models.decoder import Model
from headrace.engine.plan import SamplingRows, StepPlan
from headrace.kernels.sample import sample
from headrace.kernels.step_inputs import step_inputs


class ModelRunner:
    """Executes plans in the order given. S slots, M blocks a slot at most."""

    def __init__(self, model: Model, kv: KVCache, max_slots: int, max_context: int) -> None:
        self.model = model
        self.kv = kv
        self.device = kv.arena.device
        max_blocks = -(-max_context // kv.block_size)

        def per_slot(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_slots, *shape, dtype=dtype, device=self.device)

        self.block_tables = per_slot(torch.int32, max_blocks)
        self.last_tokens = per_slot(torch.int64)
        self.temperature = per_slot(torch.float32)
        self.top_k = per_slot(torch.int32)
        self.top_p = per_slot(torch.float32)
        self.min_p = per_slot(torch.float32)
        self.seeds = per_slot(torch.int64)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Sampled tokens, [K] int64 on the device, in the order of ``plan.sample_rows``."""
        self._update(plan)
        query_start = torch.zeros(len(plan.slots) + 1, dtype=torch.int32)
        torch.cumsum(torch.from_numpy(plan.query_lens), 0, out=query_start[1:])
        sample_at = (query_start[1:] - 1)[torch.from_numpy(plan.sample_rows)]
        starts, slots = torch.from_numpy(plan.starts), torch.from_numpy(plan.slots)
        context_lens = starts + torch.from_numpy(plan.query_lens)
        sampled_slots = slots[torch.from_numpy(plan.sample_rows)]
        sampled_positions = context_lens[torch.from_numpy(plan.sample_rows)].long()
        token_ids = torch.from_numpy(plan.token_ids).long()

        slots, query_start = self._to_device(slots), self._to_device(query_start)
        ids, positions, slot_mapping = step_inputs(
            self._to_device(token_ids), query_start, slots, self._to_device(starts),
            self.last_tokens, self.block_tables, self.kv.block_size,
        )  # fmt: skip
        config = self.model.config
        context = StepContext(
            kv=self.kv,
            slot_mapping=slot_mapping,
            block_tables=self.block_tables,
            slots=slots,
            query_start=query_start,
            context_lens=self._to_device(context_lens),
            num_decodes=plan.num_decodes,
            max_query_len=plan.max_query_len,
            max_context_len=plan.max_context_len,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        hidden = self.model.forward(ids, positions, context)
        if not len(plan.sample_rows):
            return torch.empty(0, dtype=torch.int64, device=self.device)
        rows = self._to_device(sampled_slots).long()
        tokens = sample(
            self.model.logits(hidden[self._to_device(sample_at)]),
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seeds[rows],
            self._to_device(sampled_positions), all_greedy=plan.all_greedy, no_filters=plan.no_filters,
        )  # fmt: skip
        self.last_tokens[rows] = tokens
        return tokens

    def _update(self, plan: StepPlan) -> None:
        """Bring the slot table up to date with what changed on the host."""
        if len(plan.table_slots):
            slots = self._to_device(torch.from_numpy(plan.table_slots).long())
            index = self._to_device(torch.from_numpy(plan.table_index).long())
            self.block_tables[slots, index] = self._to_device(torch.from_numpy(plan.table_blocks))
        rows: SamplingRows = plan.sampling
        if len(rows.slots):
            slots = self._to_device(torch.from_numpy(rows.slots).long())
            for table, values in (
                (self.temperature, rows.temperature),
                (self.top_k, rows.top_k),
                (self.top_p, rows.top_p),
                (self.min_p, rows.min_p),
                (self.seeds, rows.seeds),
            ):
                table[slots] = self._to_device(torch.from_numpy(values))

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
