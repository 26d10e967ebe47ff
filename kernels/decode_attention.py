# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of one query token a row over a paged cache.

    out_r = sum_j softmax_j(scale q_r . k_j) v_j        over row r's context_lens[r] keys

q: [R, Hq, D]; caches: [N, Hkv, B, D]; keys are found through block_tables[slots[r]]. A row without keys (padding) gets
zeros.

Rows are of any length, one of them perhaps longer than all others together. So a step's keys are first cut into splits of
about equal size (``split_keys``, once for all layers): short rows are one split each, long ones as many as it takes. A
program works on one split; of those of a row the last to end merges them by their log-sum-exps:

    out = sum_s 2^(lse_s - max) out_s / sum_s 2^(lse_s - max)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import (
    LAUNCH_OPTIONS,
    cdiv,
    check,
    multiprocessors,
    next_power_of_2,
    use_triton,
)
from headrace.kernels.paged import gather_pages
from headrace.kernels.shared_prefix import PREFIX_SPLITS, SharedPrefixes, attend_to_shared_prefixes

_LOG2_E = 1.4426950408889634


class Splits(NamedTuple):
    """A step's keys cut into C splits, on the device; made by ``split_keys``.

    table: [6, C] int32; of each split its row (-1: none, the table has room left), the row's slot, its first key and the
    key after its last, which of the row's splits it is, and how many the row has. A row's splits stand side by side, rows
    with longer ones first, so that no long split is begun when the others end.
    arrived: [R, Hkv] int32, how many of a row's splits have ended; zeros before a launch and after it.
    """

    table: Tensor
    arrived: Tensor


@triton.jit
def _splits_of(num_keys, least_keys, BLOCK_N: tl.constexpr):
    """Into how many splits rows are cut, at least one each, and how many tiles of keys a split of them has."""
    tiles = tl.cdiv(num_keys, BLOCK_N)
    tiles_a_split = tl.cdiv(tiles, tl.maximum(num_keys // least_keys, 1))
    return tl.cdiv(tiles, tl.maximum(tiles_a_split, 1)), tiles_a_split


@triton.jit(
    do_not_specialize=["num_rows", "capacity", "wanted", "least_keys", "kv_heads"],
    do_not_specialize_on_alignment=["slots_ptr", "context_lens_ptr", "prefix_lens_ptr"],
)
def _split_keys_kernel(
    slots_ptr,  # [R] int32
    context_lens_ptr,  # [R] int32
    prefix_lens_ptr,  # [R] int32, read when SHARED
    table_ptr,  # [6, C] int32
    arrived_ptr,  # [R, Hkv] int32
    num_rows,
    capacity,  # C
    wanted,  # splits beyond one a row
    least_keys,  # of a split, where a row has several
    kv_heads,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program cuts one row, and adds up the other rows' keys and splits for itself."""
    row = tl.program_id(0)
    all_keys = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        all_keys += tl.load(context_lens_ptr + rows, mask=rows < num_rows, other=0)
        if SHARED:
            all_keys -= tl.load(prefix_lens_ptr + rows, mask=rows < num_rows, other=0)
    # Splits of so many keys: no more of them than rows and wanted ones together.
    least_keys = tl.maximum(tl.cdiv(tl.sum(all_keys), wanted), least_keys).to(tl.int32)

    slot, context, prefix = tl.load(slots_ptr + row), tl.load(context_lens_ptr + row), 0
    if SHARED:
        prefix = tl.load(prefix_lens_ptr + row)
    splits, tiles = _splits_of(context - prefix, least_keys, BLOCK_N)
    num_splits = tl.maximum(splits, 1)

    before, all_splits = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        num_keys = tl.load(context_lens_ptr + rows, mask=rows < num_rows, other=0)
        if SHARED:
            num_keys -= tl.load(prefix_lens_ptr + rows, mask=rows < num_rows, other=0)
        others, their_tiles = _splits_of(num_keys, least_keys, BLOCK_N)
        others = tl.where(rows < num_rows, tl.maximum(others, 1), 0)
        all_splits += others
        before += tl.where((their_tiles > tiles) | ((their_tiles == tiles) & (rows < row)), others, 0)
    first_split = tl.sum(before)
    for first in range(0, num_splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        key_start = prefix + split * tiles * BLOCK_N
        key_end = tl.minimum(key_start + tiles * BLOCK_N, context)
        at, mask = table_ptr + first_split + split, split < num_splits
        tl.store(at, row, mask=mask)
        tl.store(at + capacity, slot, mask=mask)
        tl.store(at + 2 * capacity, key_start, mask=mask)
        tl.store(at + 3 * capacity, key_end, mask=mask)
        tl.store(at + 4 * capacity, split, mask=mask)
        tl.store(at + 5 * capacity, num_splits, mask=mask)
    if row == 0:
        for first in range(tl.sum(all_splits), capacity, BLOCK):
            unused = first + tl.arange(0, BLOCK)
            tl.store(table_ptr + unused, -1, mask=unused < capacity)
    for first in range(0, kv_heads, BLOCK):
        kv_head = first + tl.arange(0, BLOCK)
        tl.store(arrived_ptr + row * kv_heads + kv_head, 0, mask=kv_head < kv_heads)


@triton.jit(do_not_specialize=["capacity"])
def _decode_attention_kernel(
    q_ptr,  # [R, Hq, D], rows q_stride apart
    k_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    v_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    splits_ptr,  # [6, C] int32
    arrived_ptr,  # [R, Hkv] int32
    out_ptr,  # [R, Hq, D], rows out_stride apart
    parts_ptr,  # [C, Hq, D] fp32, written by splits that are not their row's only one
    lse_ptr,  # [C, Hq] fp32, in base 2, likewise
    prefix_parts_ptr,  # [R, Hq, PREFIX_SPLITS, D] fp32, read when SHARED
    prefix_lse_ptr,  # [R, Hq, PREFIX_SPLITS] fp32, read when SHARED
    q_stride,
    out_stride,
    block_stride,
    table_stride,
    capacity,  # C
    scale_log2,  # scale * log2(e): the softmax is taken in base 2
    GROUP: tl.constexpr,  # query heads a key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_M: tl.constexpr,  # GROUP, rounded up to what a matrix product needs
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,  # whether rows may start from the part of a shared prefix
    PREFIX_SPLITS: tl.constexpr,
):
    """One program covers the query heads of one key head of one row, and one split of the row's keys."""
    kv_head, entry = tl.program_id(0), splits_ptr + tl.program_id(1)
    row = tl.load(entry).to(tl.int64)
    if row < 0:
        return
    slot = tl.load(entry + capacity).to(tl.int64)
    key_start, key_end = tl.load(entry + 2 * capacity), tl.load(entry + 3 * capacity)
    split, num_splits = tl.load(entry + 4 * capacity), tl.load(entry + 5 * capacity)
    num_heads = tl.num_programs(0) * GROUP

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
        if (key_start > 0) & (split == 0):
            # The running softmax carries on from where the shared prefix left it.
            first_part = (row * num_heads + heads) * PREFIX_SPLITS
            for part in range(PREFIX_SPLITS):
                lse = tl.load(prefix_lse_ptr + first_part + part, mask=group < GROUP, other=float("-inf"))
                there = mask & (lse > float("-inf"))[:, None]
                part_row = prefix_parts_ptr + (first_part + part)[:, None] * HEAD_DIM + columns[None, :]
                values = tl.load(part_row, mask=there, other=0.0)
                accumulated, total, highest = _merge(accumulated, total, highest, values, lse)
    if key_start < key_end:
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
    out_row = out_ptr + row * out_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    if num_splits == 1:
        tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # A split of several has keys, so that its total is above 0.
        first_part = (tl.program_id(1) - split).to(tl.int64) * num_heads + heads
        part = first_part + split * num_heads
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + columns[None, :], out, mask=mask)
        tl.store(lse_ptr + part, highest + tl.log2(total), mask=group < GROUP)
        tl.debug_barrier()  # the other threads' stores come before this one's count
        arrived = arrived_ptr + row * tl.num_programs(0) + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(arrived, 0)
            accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for first in range(0, num_splits, 4):
                for i in tl.static_range(4):  # so that several are on their way from the memory
                    other = first + i + tl.zeros_like(group)
                    there = (group < GROUP) & (other < num_splits)
                    part = first_part + other * num_heads
                    part_row = parts_ptr + part[:, None] * HEAD_DIM + columns[None, :]
                    # Past the first cache, which knows nothing of other processors' stores.
                    lse = tl.load(lse_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
                    values = tl.load(
                        part_row, mask=there[:, None] & column_mask, other=0.0, cache_modifier=".cg"
                    )
                    accumulated, total, highest = _merge(accumulated, total, highest, values, lse)
            out = accumulated / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge(accumulated, total, highest, values, lse):
    """A running softmax goes on over the keys of a part. values: [M, D] fp32. lse: [M], in base 2; -inf for no keys."""
    new_highest = tl.maximum(highest, lse)
    safe = tl.where(new_highest > float("-inf"), new_highest, 0.0)
    weight, shrink = tl.exp2(lse - safe), tl.exp2(highest - safe)
    return accumulated * shrink[:, None] + values * weight[:, None], total * shrink + weight, new_highest


class _Tile(NamedTuple):
    """How a program is laid out: keys at a time, warps, and tiles in flight."""

    keys: int
    warps: int
    stages: int


def _tile(itemsize: int) -> _Tile:
    """The tile for values of a size in bytes."""
    return _Tile(keys=64, warps=4, stages=3) if itemsize <= 2 else _Tile(keys=32, warps=4, stages=2)


_PROGRAMS_AN_SM = 12  # enough waves that the last, partial one costs little
# Of a split, where a row has several. A split costs what some 200 keys do; while processors are idle it may.
_LEAST_KEYS, _LEAST_KEYS_OF_FEW = 512, 256


def split_keys(
    slots: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    kv_heads: int,
    itemsize: int,
    shared: SharedPrefixes | None = None,
) -> Splits | None:
    """Cut the keys of a step's rows into splits that fill the device. None where no kernel would read them.

    slots, context_lens: [R] int32. max_context_len bounds context_lens. itemsize: of a value of q, in bytes. The keys of
    a shared prefix belong to no split.
    """
    rows, device = len(context_lens), context_lens.device
    if not use_triton(context_lens) or not rows:
        return None
    processors = multiprocessors(device)
    wanted = cdiv(processors * _PROGRAMS_AN_SM, kv_heads)
    least_keys = _LEAST_KEYS if rows * kv_heads >= processors else _LEAST_KEYS_OF_FEW
    capacity = rows + min(wanted, rows * max(max_context_len // least_keys - 1, 0))
    table = torch.empty((6, capacity), dtype=torch.int32, device=device)
    arrived = torch.empty((rows, kv_heads), dtype=torch.int32, device=device)
    _split_keys_kernel[(rows,)](
        slots, context_lens, shared.prefix_lens if shared is not None else None, table, arrived,
        rows, capacity, wanted, least_keys, kv_heads, SHARED=shared is not None, BLOCK_N=_tile(itemsize).keys,
        BLOCK=1024, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return Splits(table, arrived)


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
    splits: Splits | None = None,
) -> Tensor:
    """Attend from each row's one query to all of its keys. Shapes as in the module's docstring.

    block_tables: [S, M] int32. slots, context_lens: [R] int32. max_context_len bounds context_lens. shared says which
    rows begin with the same blocks; it changes the work, not the result. splits: of these rows by split_keys, which is
    called for them if they are not given. Returns out [R, Hq, D], made if not given.
    """
    check(
        q.dim() == 3 and q.shape[1] % k_cache.shape[1] == 0, "q must be [R, Hq, D] with Hq a multiple of Hkv"
    )
    check(q.shape[0] == slots.shape[0] == context_lens.shape[0], "q, slots and context_lens have a row each")
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
    splits = splits or split_keys(slots, context_lens, max_context_len, kv_heads, q.itemsize, shared)
    assert splits is not None
    capacity = splits.table.shape[1]
    parts = torch.empty((capacity, num_heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((capacity, num_heads), dtype=torch.float32, device=q.device)
    tile = _tile(q.itemsize)
    group = num_heads // kv_heads
    _decode_attention_kernel[(kv_heads, capacity)](
        q, k_cache, v_cache, block_tables, splits.table, splits.arrived, out, parts, lse, prefix_parts, prefix_lse,
        q.stride(0), out.stride(0), k_cache.stride(0), block_tables.stride(0), capacity, scale * _LOG2_E,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_D=next_power_of_2(head_dim),
        BLOCK_M=max(next_power_of_2(group), 16), BLOCK_N=tile.keys, SHARED=shared is not None,
        PREFIX_SPLITS=PREFIX_SPLITS, num_warps=tile.warps, num_stages=tile.stages, **LAUNCH_OPTIONS,
    )  # fmt: skip
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
