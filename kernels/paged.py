"""Reading the paged cache with plain torch, for the references and the CPU paths."""

import torch
from torch import Tensor


def gather_pages(cache: Tensor, blocks: Tensor) -> Tensor:
    """The pages of some sequences, side by side. cache: [N, Hkv, B, D] contiguous; blocks: [R, m].

    Returns [R, Hkv, m * B, D] in one copy of whole (block, head) tiles.
    """
    num_blocks, kv_heads, block_size, head_dim = cache.shape
    rows, pages = blocks.shape
    tiles = cache.view(num_blocks * kv_heads, block_size * head_dim)
    heads = torch.arange(kv_heads, device=cache.device)
    index = blocks[:, None, :] * kv_heads + heads[None, :, None]
    return tiles.index_select(0, index.flatten()).view(rows, kv_heads, pages * block_size, head_dim)
