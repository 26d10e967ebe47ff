# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Causal attention of many query tokens a row over a paged cache.

    out_i = sum_j softmax_j(scale q_i . k_j) v_j        over the keys j at or before query i's position

q: [T, Hq, D], rows packed one after another (row r owns query_start[r] .. query_start[r + 1] - 1); caches:
[N, Hkv, B, D]. Row r has context_lens[r] keys, the last of them its own query tokens, so its query i sits at position
context_lens[r] - query_len + i. Keys are found through block_tables[slots[r]].
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, next_power_of_2, use_triton
from headrace.kernels.paged import gather_pages
from headrace.kernels.prefill_hopper import hopper_tiles, prefill_hopper
from headrace.kernels.query_tiles import QueryTiles

_LOG2_E = 1.4426950408889634


@triton.jit
def blocks_of(table_ptr, keys, key_end, BLOCK_SIZE: tl.constexpr):
    """The cache blocks that hold some keys."""
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < key_end, other=0).to(tl.int64)


@triton.jit
def attend_tile(
    q,  # [BLOCK_M, BLOCK_D]
    accumulated,  # [BLOCK_M, BLOCK_D] fp32
    total,  # [BLOCK_M] fp32, the running sum of exponentials
    highest,  # [BLOCK_M] fp32, the running maximum, in base 2
    block,  # [BLOCK_N] int64, the cache block of each of this tile's keys
    key_start,
    key_end,
    positions,  # [BLOCK_M]
    k_head_ptr,
    v_head_ptr,
    table_ptr,
    block_stride,
    scale_log2,
    MASKED: tl.constexpr,  # whether keys may lie past key_end or past a query's position
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold BLOCK_N keys into the running softmax. Returns the running values and the next tile's blocks.

    Blocks are looked up one tile ahead: so the loads of k and v depend on no other load of their iteration, and the
    compiler can keep several tiles of them in flight.
    """
    keys = key_start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    offsets = block[:, None] * block_stride + (keys % BLOCK_SIZE)[:, None] * HEAD_DIM + columns[None, :]
    if MASKED:
        mask = (keys < key_end)[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(k_head_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_head_ptr + offsets, mask=mask, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(k_head_ptr + offsets, mask=(columns < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_head_ptr + offsets, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_head_ptr + offsets)
        v = tl.load(v_head_ptr + offsets)
    block = blocks_of(table_ptr, keys + BLOCK_N, key_end, BLOCK_SIZE)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & (keys < key_end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, axis=1)
    accumulated = accumulated * shrink[:, None]
    accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
    return accumulated, total, new_highest, block


# Batch sizes change from step to step: neither they nor where a slice of a buffer starts may ask for a compilation.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_ptr", "context_lens_ptr"],
)
def _prefill_attention_kernel(
    q_ptr,  # [T, Hq, D], tokens q_stride apart
    k_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    v_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    slots_ptr,  # [R] int32
    query_start_ptr,  # [R + 1] int32
    context_lens_ptr,  # [R] int32
    out_ptr,  # [T, Hq, D], tokens out_stride apart
    q_stride,
    out_stride,
    block_stride,
    table_stride,
    num_rows,
    scale_log2,  # scale * log2(e): the softmax is taken in base 2
    GROUP: tl.constexpr,  # query heads a key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
):
    """One program covers one key head and TOKENS query tokens of one row: BLOCK_M rows of (token, head) pairs.

    Row r's tiles begin at number query_start[r] // TOKENS + r, which leaves each row room for its last, partial tile;
    a program whose tile is not used ends at once. So the grid follows from T and R alone.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # A row's last tiles see the most keys: they start first, so that the grid does not end on a long one.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)

    started = tl.zeros([128], tl.int32)
    for first in range(0, num_rows, 128):
        candidates = first + tl.arange(0, 128)
        begins = tl.load(query_start_ptr + candidates, mask=candidates < num_rows, other=0)
        started += ((begins // TOKENS + candidates <= tile) & (candidates < num_rows)).to(tl.int32)
    row = tl.sum(started) - 1

    row_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - row_start
    first_token = (tile - row_start // TOKENS - row) * TOKENS
    if first_token >= query_len:
        return

    context = tl.load(context_lens_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    table_ptr = block_tables_ptr + slot * table_stride
    k_head_ptr = k_cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_head_ptr = v_cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)

    pairs = tl.arange(0, BLOCK_M)
    tokens = first_token + pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    columns = tl.arange(0, BLOCK_D)
    mask = ((pairs < TOKENS * GROUP) & (tokens < query_len))[:, None] & (columns < HEAD_DIM)[None, :]
    token_rows = (row_start + tokens).to(tl.int64)[:, None]
    offsets = heads[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + token_rows * q_stride + offsets, mask=mask, other=0.0)

    positions = context - query_len + tokens
    first_position = context - query_len + first_token
    key_end = tl.minimum(first_position + TOKENS, context)
    unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if BATCH_INVARIANT:
        # Which keys need no mask depends on the queries of the tile: here all go through the same loop.
        unmasked_end = 0

    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    block = blocks_of(table_ptr, tl.arange(0, BLOCK_N), key_end, BLOCK_SIZE)
    for start in range(0, unmasked_end, BLOCK_N):
        accumulated, total, highest, block = attend_tile(
            q, accumulated, total, highest, block, start, key_end, positions, k_head_ptr, v_head_ptr, table_ptr,
            block_stride, scale_log2, False, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    for start in range(unmasked_end, key_end, BLOCK_N):
        accumulated, total, highest, block = attend_tile(
            q, accumulated, total, highest, block, start, key_end, positions, k_head_ptr, v_head_ptr, table_ptr,
            block_stride, scale_log2, True, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N,
        )  # fmt: skip

    if BATCH_INVARIANT:
        total = tl.where(total == 0, 1.0, total)  # padding, which has no keys
    out = (accumulated / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token_rows * out_stride + offsets, out, mask=mask)


class Tile(NamedTuple):
    """How a program is laid out: (token, head) pairs, keys at a time, warps, tiles in flight, registers a thread."""

    pairs: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # None: as many as the compiler likes


def _tile(itemsize: int) -> Tile:
    """The tile for values of a size in bytes."""
    if itemsize > 2:
        return Tile(pairs=64, keys=32, warps=4, stages=2)
    # Two programs fit a multiprocessor at 128 registers a thread: one multiplies while the other exponentiates.
    # On an H200 that is worth 8% at 8k tokens, a few spilt registers and one stage less included.
    return Tile(pairs=128, keys=64, warps=8, stages=2, registers=128)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    tiles: QueryTiles | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Attend from every query token to the keys at or before its position. Shapes as in the module's docstring.

    block_tables: [S, M] int32. slots, context_lens: [R] int32. query_start: [R + 1] int32. tiles: of these rows by
    hopper_tiles, which is called for them if they are not given. batch_invariant: a query's bits depend on its position
    and its keys alone: not on the queries beside it, nor on how many of the keys are its own row's of this step; rows
    without keys get zeros. Returns out [T, Hq, D], made if not given.
    """
    check(
        q.dim() == 3 and q.shape[1] % k_cache.shape[1] == 0, "q must be [T, Hq, D] with Hq a multiple of Hkv"
    )
    check(
        query_start.shape[0] == slots.shape[0] + 1 == context_lens.shape[0] + 1,
        "query_start has one entry more than slots",
    )
    out = torch.empty_like(q) if out is None else out
    if not use_triton(q):
        attend = _one_query_at_a_time if batch_invariant else _prefill_attention_cpu
        return attend(q, k_cache, v_cache, block_tables, slots, query_start, context_lens, scale, out)
    tokens, num_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    check(q[:1].is_contiguous() and out[:1].is_contiguous(), "a token of q and out must be contiguous")
    check(k_cache[0].is_contiguous() and k_cache.stride() == v_cache.stride(), "the caches must match")
    if tokens == 0:
        return out
    if not batch_invariant and q.dtype == k_cache.dtype:
        tiles = tiles or hopper_tiles(slots, query_start, context_lens, tokens, num_heads, k_cache)
        if tiles is not None:
            return prefill_hopper(q, k_cache, v_cache, block_tables, tiles, scale, out)
    tile = _tile(q.itemsize)
    group = num_heads // kv_heads
    grid = (kv_heads, tokens // (tile.pairs // group) + slots.shape[0])
    _prefill_attention_kernel[grid](
        q, k_cache, v_cache, block_tables, slots, query_start, context_lens, out,
        q.stride(0), out.stride(0), k_cache.stride(0), block_tables.stride(0), slots.shape[0], scale * _LOG2_E,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_D=next_power_of_2(head_dim),
        BLOCK_M=tile.pairs, BLOCK_N=tile.keys, BATCH_INVARIANT=batch_invariant, num_warps=tile.warps,
        num_stages=tile.stages, maxnreg=tile.registers, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def _rows_with_keys(
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """For each row with queries and keys: first token, end, number of keys, and K and V of its blocks, [Hkv, m * B, D]."""
    block_size = k_cache.shape[2]
    bounds = query_start.tolist()
    rows = zip(bounds[:-1], bounds[1:], slots.tolist(), context_lens.tolist(), strict=True)
    for first, end, slot, context in rows:
        if first < end and context > 0:
            blocks = block_tables[slot : slot + 1, : -(-context // block_size)]
            yield first, end, context, gather_pages(k_cache, blocks)[0], gather_pages(v_cache, blocks)[0]


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
    rows = _rows_with_keys(k_cache, v_cache, block_tables, slots, query_start, context_lens)
    for first, end, context, k, v in rows:
        if not (_finite(q[first:end]) and _finite(k[:, :context])):
            # The library adds its mask to the scores: a key that is NaN is one to queries that do not see it, too. And
            # a query all of whose scores are NaN is one without keys to it, whose result is zero.
            out[first:end] = _each_query(q[first:end], k[:, :context], v[:, :context], scale)
            continue
        queries = end - first
        whole = queries == context  # nothing cached: the plain causal case, which needs no mask
        mask = None if whole else torch.ones(queries, context, dtype=torch.bool).tril_(context - queries)
        out[first:end] = F.scaled_dot_product_attention(
            q[first:end].transpose(0, 1)[None],
            k[None, :, :context].to(q.dtype),
            v[None, :, :context].to(q.dtype),
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def _finite(x: Tensor) -> bool:
    """Whether all of x is finite, by its sum: that takes a tenth of the time that asking each value does."""
    return bool(x.sum(dtype=torch.float32).isfinite())


def _one_query_at_a_time(
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
    """As ``_each_query``, for all rows. Rows without keys get zeros."""
    out.zero_()
    rows = _rows_with_keys(k_cache, v_cache, block_tables, slots, query_start, context_lens)
    for first, end, context, k, v in rows:
        out[first:end] = _each_query(q[first:end], k[:, :context], v[:, :context], scale)
    return out


def _each_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Two products a query, in fp32, whose shapes follow from its position alone.

    q: [T, Hq, D], the last T positions of K. k, v: [Hkv, K, D]. Returns [T, Hq, D] fp32.
    """
    (kv_heads, context, head_dim), tokens = k.shape, len(q)
    k, v = k.float(), v.float()
    out = torch.empty(q.shape, dtype=torch.float32)
    queries = (q.float() * scale).view(tokens, kv_heads, -1, head_dim)
    for token, query in enumerate(queries):
        keys = context - tokens + token + 1
        weights = (query @ k[:, :keys].transpose(1, 2)).softmax(dim=-1)
        out[token] = (weights @ v[:, :keys]).view(-1, head_dim)
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
