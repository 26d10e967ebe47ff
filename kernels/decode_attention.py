# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of one query token a row over a paged cache.

    out_r = sum_j softmax_j(scale q_r . k_j) v_j        over row r's context_lens[r] keys

q: [R, Hq, D]; caches: [N, Hkv, B, D]; keys are found through block_tables[slots[r]]. A row without keys (padding) gets
zeros.

Where rows and key heads do not fill the chip, a row's keys are split among programs; each keeps its own softmax, and a
second kernel merges them by their log-sum-exps:  out = sum_s 2^(lse_s - max) out_s / sum_s 2^(lse_s - max).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, multiprocessors, use_triton
from headrace.kernels.paged import gather_pages
from headrace.kernels.shared_prefix import PREFIX_SPLITS, SharedPrefixes, attend_to_shared_prefixes

_LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["slots_ptr", "context_lens_ptr", "prefix_lens_ptr"],
)
def _decode_attention_kernel(
    q_ptr,  # [R, Hq, D], rows q_stride apart
    k_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    v_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    slots_ptr,  # [R] int32
    context_lens_ptr,  # [R] int32
    out_ptr,  # [R, Hq, D], rows out_stride apart; [R, Hq, splits, D] fp32 when SPLIT
    lse_ptr,  # [R, Hq, splits] fp32, in base 2; written when SPLIT
    prefix_lens_ptr,  # [R] int32, read when SHARED
    prefix_parts_ptr,  # [R, Hq, PREFIX_SPLITS, D] fp32, read when SHARED
    prefix_lse_ptr,  # [R, Hq, PREFIX_SPLITS] fp32, read when SHARED
    q_stride,
    out_stride,
    block_stride,
    table_stride,
    num_splits,
    scale_log2,  # scale * log2(e): the softmax is taken in base 2
    GROUP: tl.constexpr,  # query heads a key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_M: tl.constexpr,  # GROUP, rounded up to what a matrix product needs
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED: tl.constexpr,  # whether rows may start from the part of a shared prefix
    PREFIX_SPLITS: tl.constexpr,
):
    """One program covers the query heads of one key head of one row, and one split of the row's keys.

    How many keys a split has follows from the row's own length, read on the device: short rows leave their last
    splits empty.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    context = tl.load(context_lens_ptr + row)
    prefix = 0
    if SHARED:
        prefix = tl.load(prefix_lens_ptr + row)
    tiles = tl.cdiv(tl.cdiv(context - prefix, BLOCK_N), num_splits)
    key_start = prefix + split * tiles * BLOCK_N
    key_end = tl.minimum(key_start + tiles * BLOCK_N, context)

    group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + group
    columns = tl.arange(0, BLOCK_D)
    column_mask = (columns < HEAD_DIM)[None, :]
    mask = (group < GROUP)[:, None] & column_mask
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)

    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SHARED:  # noqa: SIM102 (the condition below is a value of the device)
        if (prefix > 0) & (split == 0):
            # The running softmax carries on from where the shared prefix left it.
            first_part = (row * tl.num_programs(0) * GROUP + heads) * PREFIX_SPLITS
            for part in range(PREFIX_SPLITS):
                lse = tl.load(prefix_lse_ptr + first_part + part, mask=group < GROUP, other=float("-inf"))
                there = mask & (lse > float("-inf"))[:, None]
                part_row = prefix_parts_ptr + (first_part + part)[:, None] * HEAD_DIM + columns[None, :]
                new_highest = tl.maximum(highest, lse)
                safe = tl.where(new_highest > float("-inf"), new_highest, 0.0)
                weight, shrink = tl.exp2(lse - safe), tl.exp2(highest - safe)
                total = total * shrink + weight
                values = tl.load(part_row, mask=there, other=0.0)
                accumulated = accumulated * shrink[:, None] + values * weight[:, None]
                highest = new_highest
    if key_start < key_end:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        table_ptr = block_tables_ptr + slot * table_stride
        k_head_ptr = k_cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
        v_head_ptr = v_cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
        keys = key_start + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < key_end, other=0).to(tl.int64)
        for start in range(key_start, key_end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            inside = keys < key_end
            within = (keys % BLOCK_SIZE)[:, None] * HEAD_DIM + columns[None, :]
            offsets = block[:, None] * block_stride + within
            k = tl.load(k_head_ptr + offsets, mask=inside[:, None] & column_mask, other=0.0)
            v = tl.load(v_head_ptr + offsets, mask=inside[:, None] & column_mask, other=0.0)
            # Blocks are looked up one tile ahead: so the loads of k and v depend on no other load of their
            # iteration, and the compiler can keep several tiles of them in flight.
            keys += BLOCK_N
            block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < key_end, other=0).to(tl.int64)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_highest[:, None])
            shrink = tl.exp2(highest - new_highest)
            total = total * shrink + tl.sum(weights, axis=1)
            accumulated = accumulated * shrink[:, None]
            accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
            highest = new_highest

    out = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        part = (row * tl.num_programs(0) * GROUP + heads) * num_splits + split
        tl.store(out_ptr + part[:, None] * HEAD_DIM + columns[None, :], out, mask=mask)
        lse = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=group < GROUP)
    else:
        out_row = out_ptr + row * out_stride + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge_splits_kernel(
    parts_ptr,  # [R, Hq, splits, D] fp32
    lse_ptr,  # [R, Hq, splits] fp32, in base 2
    out_ptr,  # [R, Hq, D], rows out_stride apart
    out_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two
):
    """One program merges the splits of one head of one row. A row without keys becomes zeros."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = (row * tl.num_programs(0) + head) * SPLITS
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + first + splits)
    highest = tl.max(lse, axis=0)
    weights = tl.where(lse > float("-inf"), tl.exp2(lse - highest), 0.0)
    used = (weights > 0)[:, None] & (columns < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + (first + splits)[:, None] * HEAD_DIM + columns[None, :], mask=used, other=0.0)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    out_row = out_ptr + row * out_stride + head * HEAD_DIM + columns
    tl.store(out_row, merged.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)


class _Tile(NamedTuple):
    """How a program is laid out: keys at a time, warps, and tiles in flight."""

    keys: int
    warps: int
    stages: int


def _tile(itemsize: int) -> _Tile:
    """The tile for values of a size in bytes."""
    return _Tile(keys=64, warps=4, stages=3) if itemsize <= 2 else _Tile(keys=32, warps=4, stages=2)


_PROGRAMS_AN_SM = 12  # enough waves that the last, partial one costs little
LEAST_KEYS_A_SPLIT = 256
MOST_SPLITS = 64


def _num_splits(rows: int, kv_heads: int, max_context_len: int, device: torch.device) -> int:
    """Into how many parts each row's keys are split: a power of two, from what the host knows without a sync."""
    wanted = multiprocessors(device) * _PROGRAMS_AN_SM // (rows * kv_heads)
    most = min(max(max_context_len // LEAST_KEYS_A_SPLIT, 1), MOST_SPLITS)
    return 1 << (max(min(wanted, most), 1).bit_length() - 1)


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
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Attend from each row's one query to all of its keys. Shapes as in the module's docstring.

    block_tables: [S, M] int32. slots, context_lens: [R] int32. max_context_len bounds context_lens. shared says which
    rows begin with the same blocks; it changes the work, not the result. Returns out [R, Hq, D], made if not given.
    """
    check(
        q.dim() == 3 and q.shape[1] % k_cache.shape[1] == 0, "q must be [R, Hq, D] with Hq a multiple of Hkv"
    )
    check(len(q) == len(slots) == len(context_lens), "q, slots and context_lens have a row each")
    out = torch.empty_like(q) if out is None else out
    if not use_triton(q):
        return _decode_attention_cpu(q, k_cache, v_cache, block_tables, slots, context_lens, scale, out)
    rows, num_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    check(q[:1].is_contiguous() and out[:1].is_contiguous(), "a row of q and out must be contiguous")
    check(k_cache[0].is_contiguous() and k_cache.stride() == v_cache.stride(), "the caches must match")
    if rows == 0:
        return out
    prefix_parts, prefix_lse = None, None
    if shared is not None:
        prefix_parts, prefix_lse = attend_to_shared_prefixes(
            q, k_cache, v_cache, block_tables, slots, shared, scale
        )
    splits = _num_splits(rows, kv_heads, max_context_len, q.device)
    if splits == 1:
        parts, lse = out, None
    else:
        parts = torch.empty((rows, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, num_heads, splits), dtype=torch.float32, device=q.device)
    tile = _tile(q.itemsize)
    group = num_heads // kv_heads
    block_d = triton.next_power_of_2(head_dim)
    _decode_attention_kernel[(kv_heads, rows, splits)](
        q, k_cache, v_cache, block_tables, slots, context_lens, parts, lse,
        shared.prefix_lens if shared is not None else None, prefix_parts, prefix_lse,
        q.stride(0), out.stride(0), k_cache.stride(0), block_tables.stride(0), splits, scale * _LOG2_E,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_D=block_d,
        BLOCK_M=max(triton.next_power_of_2(group), 16), BLOCK_N=tile.keys, SPLIT=splits > 1,
        SHARED=shared is not None, PREFIX_SPLITS=PREFIX_SPLITS, num_warps=tile.warps, num_stages=tile.stages, **LAUNCH_OPTIONS,
    )  # fmt: skip
    if splits > 1:
        _merge_splits_kernel[(num_heads, rows)](
            parts,
            lse,
            out,
            out.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLITS=splits,
            num_warps=4,
            **LAUNCH_OPTIONS,
        )
    return out


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
