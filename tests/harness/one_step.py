"""One sequence through a model by hand: the smallest step context there is."""

import torch
from torch import Tensor

from headrace.engine.kv_cache import KVCache, StepContext
from headrace.engine.models.decoder import Model


class OneSequence:
    """Feeds one sequence to a model, in as many chunks as the caller likes, over a cache of its own."""

    def __init__(self, model: Model, longest: int, block_size: int = 16) -> None:
        config, weight = model.config, model.norm
        blocks = -(-longest // block_size)
        self.model = model
        self.length = 0
        self.kv = KVCache(model.kv_specs(), blocks, block_size, weight.dtype, weight.device)
        # Blocks in falling order, so that nothing passes by taking the cache for a plain tensor.
        self.table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32, device=weight.device)
        self.heads = (config.num_heads, config.num_kv_heads, config.head_dim)

    def logits(self, ids: list[int]) -> Tensor:
        """Feed the next tokens. Returns [T, V], the logits after each."""
        device, size = self.table.device, self.kv.block_size
        positions = torch.arange(self.length, self.length + len(ids), device=device)
        self.length += len(ids)
        num_heads, num_kv_heads, head_dim = self.heads
        ctx = StepContext(
            kv=self.kv,
            slot_mapping=self.table.long()[positions // size] * size + positions % size,
            block_tables=self.table[None],
            slots=torch.zeros(1, dtype=torch.int32, device=device),
            query_start=torch.tensor([0, len(ids)], dtype=torch.int32, device=device),
            context_lens=torch.tensor([self.length], dtype=torch.int32, device=device),
            num_decodes=int(len(ids) == 1),
            max_context_len=self.length,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )
        return self.model.logits(self.model.forward(torch.tensor(ids, device=device), positions, ctx))
