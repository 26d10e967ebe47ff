# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of one query token a row over a paged cache.

    out_r = sum_j softmax_j(scale q_r . k_j) v_j        over row r's context_lens[r] keys

q: [R, Hq, D]; caches: [N, Hkv, B, D]; keys are found through block_tables[slots[r]]. A row without keys (padding) gets
zeros.
"""

import torch
from torch import Tensor

from headrace.kernels.dispatch import check
from headrace.kernels.paged import gather_pages


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row's one query to all of its keys. Shapes as in the module's docstring.

    block_tables: [S, M] int32. slots, context_lens: [R] int32. max_context_len bounds context_lens. Returns out
    [R, Hq, D], made if not given.
    """
    check(
        q.dim() == 3 and q.shape[1] % k_cache.shape[1] == 0, "q must be [R, Hq, D] with Hq a multiple of Hkv"
    )
    check(len(q) == len(slots) == len(context_lens), "q, slots and context_lens have a row each")
    out = torch.empty_like(q) if out is None else out
    return _decode_attention_cpu(q, k_cache, v_cache, block_tables, slots, context_lens, scale, out)


def _decode_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Two batched products for each group of rows with similar context lengths.

    The query heads that share a key head are the rows of the products, so that keys are read once.
    """
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    lens = context_lens.tolist()
    for group, pages in _groups_of_similar_length(lens, block_size):
        if pages == 0:
            out[group] = 0.0
            continue
        rows = torch.tensor(group)
        # Columns past a shorter row's own blocks may hold anything: they are masked below.
        blocks = block_tables[slots[rows].long(), :pages].clamp_(min=0)
        k = gather_pages(k_cache, blocks).to(q.dtype)
        v = gather_pages(v_cache, blocks).to(q.dtype)
        scores = (q[rows].view(len(group), kv_heads, -1, head_dim) @ k.transpose(2, 3)).float()
        beyond = torch.arange(pages * block_size) >= context_lens[rows, None]
        scores = scores.mul_(scale).masked_fill_(beyond[:, None, None], float("-inf"))
        out[rows] = (scores.softmax(dim=-1).to(q.dtype) @ v).view(len(group), -1, head_dim)
    return out


def _groups_of_similar_length(lens: list[int], block_size: int) -> list[tuple[list[int], int]]:
    """Rows grouped so that padding each to its group's longest wastes little. Returns (rows, pages) pairs."""
    pages = [-(-length // block_size) for length in lens]
    groups: list[tuple[list[int], int]] = []
    for row in sorted(range(len(lens)), key=pages.__getitem__, reverse=True):
        # A few pages of padding cost less than one more group does.
        if groups and pages[row] >= (longest := groups[-1][1]) - max(3, longest // 4) and pages[row] > 0:
            groups[-1][0].append(row)
        else:
            groups.append(([row], pages[row]))
    return groups


def decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """decode_attention in plain torch, a row at a time, in fp32."""
    group = q.shape[1] // k_cache.shape[1]
    block_size = k_cache.shape[2]
    out = torch.zeros_like(q)
    for row, slot in enumerate(slots.tolist()):
        positions = torch.arange(int(context_lens[row]), device=q.device)
        block = block_tables[slot, positions // block_size].long()
        k = k_cache[block, :, positions % block_size].float().repeat_interleave(group, dim=1)
        v = v_cache[block, :, positions % block_size].float().repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,khd->hk", q[row].float(), k) * scale).softmax(dim=-1)
        out[row] = torch.einsum("hk,khd->hd", weights, v).to(q.dtype)
    return out
