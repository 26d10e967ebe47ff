# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Decode attention over a prefix that rows share: its keys are read once for all of them, not once for each.

Rows whose sequences begin with the same cache blocks stand next to each other in a step. A tile is up to
rows_per_tile(group) such rows; for each of its (row, head) pairs this gives the softmax over the first tile_keys keys:

    part = sum_j softmax_j(scale q . k_j) v_j,   lse = log2 sum_j 2^(scale q . k_j log2 e)        j < tile_keys

decode_attention carries on from there over the row's own keys: a running softmax that starts at (part, 1, lse) instead
of (0, 0, -inf). Few tiles would leave most of the chip idle: then their keys are cut into up to PREFIX_SPLITS equal parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, multiprocessors, next_power_of_2
from headrace.kernels.prefill_attention import Tile, attend_tile, blocks_of

PREFIX_SPLITS: int = 4
_PAIRS = 128  # (row, head) pairs of a tile
_PROGRAMS_AN_SM = 2  # one fits at a time: the other starts wherever one has ended, which evens pieces out
_LOG2_E = 1.4426950408889634


class SharedPrefixes(NamedTuple):
    """Which rows of a step share a prefix. On the device and of fixed capacity, so that a graph can hold it.

    prefix_lens: [R] int32, how many keys of each row its tile attends to (0: none; a multiple of the block size).
    num_tiles: [1] int32, at most C. tile_start, tile_rows, tile_keys: [C] int32; the tiles are the first num_tiles of
    them, and what follows is never read. Tile c covers rows tile_start .. tile_start + tile_rows - 1, whose first
    tile_keys keys are the same blocks, found through the first row's slot.
    """

    prefix_lens: Tensor
    num_tiles: Tensor
    tile_start: Tensor
    tile_rows: Tensor
    tile_keys: Tensor


def rows_per_tile(group: int) -> int:
    """How many rows one tile may cover, with ``group`` query heads a key head."""
    return _PAIRS // group


@triton.jit
def _attend_split(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    slots_ptr,
    tile_start_ptr,
    tile_rows_ptr,
    tile_keys_ptr,
    parts_ptr,
    lse_ptr,
    q_stride,
    block_stride,
    table_stride,
    scale_log2,
    kv_head,
    tile,
    split,
    splits,  # into which tiles are cut; a short one may have fewer
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One key head of one tile, and one split of the tile's keys. Other arguments as the kernel's."""
    first_row, num_rows = tl.load(tile_start_ptr + tile), tl.load(tile_rows_ptr + tile)
    num_keys = tl.load(tile_keys_ptr + tile)
    keys_a_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), splits) * BLOCK_N
    key_start = split * keys_a_split
    key_end = tl.minimum(key_start + keys_a_split, num_keys)

    pairs = tl.arange(0, BLOCK_M)
    rows = (first_row + pairs // GROUP).to(tl.int64)
    heads = kv_head * GROUP + pairs % GROUP
    pair_mask = pairs < num_rows * GROUP
    first_part = (rows * (KV_HEADS * GROUP) + heads) * SPLITS
    if split == 0:
        parts = tl.arange(0, SPLITS)
        missing = pair_mask[:, None] & (parts * keys_a_split >= num_keys)[None, :]
        tl.store(lse_ptr + first_part[:, None] + parts[None, :], float("-inf"), mask=missing)

    if key_start < key_end:
        unmasked_end = key_start + (key_end - key_start) // BLOCK_N * BLOCK_N
        slot = tl.load(slots_ptr + first_row).to(tl.int64)
        table_ptr = block_tables_ptr + slot * table_stride
        k_head_ptr = k_cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
        v_head_ptr = v_cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)

        columns = tl.arange(0, BLOCK_D)
        mask = pair_mask[:, None] & (columns < HEAD_DIM)[None, :]
        offsets = rows[:, None] * q_stride + heads[:, None] * HEAD_DIM + columns[None, :]
        q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
        positions = tl.zeros([BLOCK_M], tl.int32) + num_keys  # every query sees every key

        accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        block = blocks_of(table_ptr, key_start + tl.arange(0, BLOCK_N), key_end, BLOCK_SIZE)
        for start in range(key_start, unmasked_end, BLOCK_N):
            accumulated, total, highest, block = attend_tile(
                q, accumulated, total, highest, block, start, key_end, positions, k_head_ptr, v_head_ptr, table_ptr,
                block_stride, scale_log2, False, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for start in range(unmasked_end, key_end, BLOCK_N):
            accumulated, total, highest, block = attend_tile(
                q, accumulated, total, highest, block, start, key_end, positions, k_head_ptr, v_head_ptr, table_ptr,
                block_stride, scale_log2, True, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N,
            )  # fmt: skip

        part = first_part + split
        tl.store(lse_ptr + part, highest + tl.log2(total), mask=pair_mask)
        out = accumulated / total[:, None]
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + columns[None, :], out, mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "slots_ptr", "num_tiles_ptr", "tile_start_ptr", "tile_rows_ptr", "tile_keys_ptr",
    ]
)  # fmt: skip
def _shared_prefix_kernel(
    q_ptr,  # [R, Hq, D], rows q_stride apart
    k_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    v_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    slots_ptr,  # [R] int32
    num_tiles_ptr,  # [1] int32
    tile_start_ptr,  # [C] int32
    tile_rows_ptr,  # [C] int32
    tile_keys_ptr,  # [C] int32
    parts_ptr,  # [R, Hq, SPLITS, D] fp32
    lse_ptr,  # [R, Hq, SPLITS] fp32, in base 2; -inf marks a part that is not there
    q_stride,
    block_stride,
    table_stride,
    scale_log2,  # scale * log2(e): the softmax is taken in base 2
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D, rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A piece of work is one key head of one tile, and one split of the tile's keys. Of P programs each takes every P-th.

    So the grid need not grow with the capacity, and room for every tile that there can be costs no empty programs. Few
    tiles are cut into as many splits as there are programs for.
    """
    num_tiles = tl.load(num_tiles_ptr)
    splits = tl.num_programs(0) // tl.maximum(num_tiles * KV_HEADS, 1)
    splits = tl.minimum(tl.maximum(splits, 1), SPLITS)
    for piece in range(tl.program_id(0), num_tiles * KV_HEADS * splits, tl.num_programs(0)):
        kv_head, tile, split = piece % KV_HEADS, piece // KV_HEADS % num_tiles, piece // KV_HEADS // num_tiles
        _attend_split(
            q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, slots_ptr, tile_start_ptr, tile_rows_ptr, tile_keys_ptr,
            parts_ptr, lse_ptr, q_stride, block_stride, table_stride, scale_log2, kv_head, tile, split, splits,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, SPLITS,
        )  # fmt: skip


def _tile(itemsize: int) -> Tile:
    """The tile for values of a size in bytes."""
    if itemsize > 2:
        return Tile(
            pairs=_PAIRS, keys=16, warps=8, stages=2
        )  # 32 keys of 128 values: too much for an Ada card
    return Tile(pairs=_PAIRS, keys=64, warps=8, stages=3)


def attend_to_shared_prefixes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    shared: SharedPrefixes,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend from each tile's rows to the keys they share. Arguments as decode_attention's.

    Returns parts [R, Hq, PREFIX_SPLITS, D] fp32 and lse [R, Hq, PREFIX_SPLITS] fp32, written for the tiles' rows; a
    part whose lse is -inf is not there.
    """
    rows, num_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    parts = torch.empty((rows, num_heads, PREFIX_SPLITS, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, num_heads, PREFIX_SPLITS), dtype=torch.float32, device=q.device)
    most_pieces = shared.tile_rows.shape[0] * kv_heads * PREFIX_SPLITS
    tile = _tile(q.itemsize)
    _shared_prefix_kernel[(min(most_pieces, _PROGRAMS_AN_SM * multiprocessors(q.device)),)](
        q, k_cache, v_cache, block_tables, slots, shared.num_tiles, shared.tile_start, shared.tile_rows,
        shared.tile_keys, parts, lse, q.stride(0), k_cache.stride(0), block_tables.stride(0), scale * _LOG2_E,
        KV_HEADS=kv_heads, GROUP=num_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=next_power_of_2(head_dim), BLOCK_M=tile.pairs, BLOCK_N=tile.keys, SPLITS=PREFIX_SPLITS,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return parts, lse
