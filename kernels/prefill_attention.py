# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Causal attention of many query tokens a row over a paged cache.

    out_i = sum_j softmax_j(scale q_i . k_j) v_j        over the keys j at or before query i's position

q: [T, Hq, D], rows packed one after another (row r owns query_start[r] .. query_start[r + 1] - 1); caches:
[N, Hkv, B, D]. Row r has context_lens[r] keys, the last of them its own query tokens, so its query i sits at position
context_lens[r] - query_len + i. Keys are found through block_tables[slots[r]].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.dispatch import check
from headrace.kernels.paged import gather_pages


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from every query token to the keys at or before its position. Shapes as in the module's docstring.

    block_tables: [S, M] int32. slots, context_lens: [R] int32. query_start: [R + 1] int32. max_query_len bounds the
    rows' query lengths. Returns out [T, Hq, D], made if not given.
    """
    check(
        q.dim() == 3 and q.shape[1] % k_cache.shape[1] == 0, "q must be [T, Hq, D] with Hq a multiple of Hkv"
    )
    check(
        len(query_start) == len(slots) + 1 == len(context_lens) + 1,
        "query_start has one entry more than slots",
    )
    out = torch.empty_like(q) if out is None else out
    return _prefill_attention_cpu(
        q, k_cache, v_cache, block_tables, slots, query_start, context_lens, scale, out
    )


def _prefill_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """One scaled_dot_product_attention a row."""
    block_size = k_cache.shape[2]
    bounds = query_start.tolist()
    rows = zip(bounds[:-1], bounds[1:], slots.tolist(), context_lens.tolist(), strict=True)
    for first, end, slot, context in rows:
        if first == end:
            continue
        blocks = block_tables[slot : slot + 1, : -(-context // block_size)]
        k = gather_pages(k_cache, blocks)[:, :, :context]
        v = gather_pages(v_cache, blocks)[:, :, :context]
        queries = end - first
        whole = queries == context  # nothing cached: the plain causal case, which needs no mask
        mask = None if whole else torch.ones(queries, context, dtype=torch.bool).tril_(context - queries)
        attended = F.scaled_dot_product_attention(
            q[first:end].transpose(0, 1)[None],
            k.to(q.dtype),
            v.to(q.dtype),
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        out[first:end] = attended[0].transpose(0, 1)
    return out


def prefill_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """prefill_attention in plain torch, a row at a time, in fp32."""
    group = q.shape[1] // k_cache.shape[1]
    block_size = k_cache.shape[2]
    out = torch.zeros_like(q)
    for row, slot in enumerate(slots.tolist()):
        first, end, context = int(query_start[row]), int(query_start[row + 1]), int(context_lens[row])
        positions = torch.arange(context, device=q.device)
        block = block_tables[slot, positions // block_size].long()
        k = k_cache[block, :, positions % block_size].float().repeat_interleave(group, dim=1)
        v = v_cache[block, :, positions % block_size].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), k) * scale
        query_positions = context - (end - first) + torch.arange(end - first, device=q.device)
        future = positions[None, :] > query_positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
