# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""prefill_attention for Hopper GPUs and long contexts: the same sums, each kind of work on warps of its own.

One warp keeps a ring of tiles of keys and values in shared memory filled (by the tensor memory accelerator: a cache
block a copy, no addresses in anybody's registers). Two warpgroups multiply, each with 64 of a program's 128
(token, head) pairs. Within a warpgroup the products of one tile run while the last tile's scores are exponentiated:

    scores_t = q k_t            in flight together with
    out     += weights_{t-1} v_{t-1}
    weights_t = exp2(scores_t - max)       while the second product is still running

A tile is four cache blocks, each a product of its own, so that a tile's blocks need not be neighbours. Tile t stands in
place t mod 3 of the ring, keys and values apart, each place with two barriers:

    ready   completes when the copies of a tile have arrived; both warpgroups wait for it
    free    completes when both warpgroups are done with a tile; the copying warp waits for it before the next one

A barrier knows only whether it has completed an odd or an even number of times (its parity). At tile t, place t mod 3 is
in its round t div 3: ``ready`` has completed that often before, so its waiters wait for parity (t div 3) mod 2. ``free`` is
one round behind, so its waiter waits for the other parity, which a barrier that has never completed passes at once.

Values past a row's last key, up to the end of their block, are multiplied by zero, not left out: they must be finite,
as whatever a model writes in bf16 is.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.dispatch import LAUNCH_OPTIONS
from headrace.kernels.hopper import SWIZZLED, copy_in, is_hopper

PAGE = 32
"""The cache's block size that the kernel is made for."""
HEAD_DIMS = (64, 128)

_LOG2_E = 1.4426950408889634
_PAIRS = gl.constexpr(128)  # (token, head) pairs of a program, half of them a warpgroup's
_PAGES = gl.constexpr(4)  # cache blocks of a tile
_STAGES = gl.constexpr(3)  # tiles of the ring


@gluon.jit
def _fill(desc, row0, row1, row2, row3, tiles, ready, free, tile):
    """Copy four blocks into a tile's place in the ring, once both warpgroups are done with what was there."""
    slot = tile % _STAGES
    at = slot * _PAGES
    bar = ready.index(slot)
    mbarrier.wait(free.index(slot), ((tile // _STAGES) & 1) ^ 1)
    mbarrier.expect(bar, _PAGES * desc.block_type.nbytes)
    copy_in(desc, [row0, 0], bar, tiles.index(at))
    copy_in(desc, [row1, 0], bar, tiles.index(at + 1))
    copy_in(desc, [row2, 0], bar, tiles.index(at + 2))
    copy_in(desc, [row3, 0], bar, tiles.index(at + 3))


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, table_ptr, block_rows, head_row, num_tiles, last_page,
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free,
):  # fmt: skip
    """The copying warp. Past a row's last block that block is copied again: nobody sees those keys."""
    for tile in range(num_tiles):
        first = tile * _PAGES
        row0 = gl.load(table_ptr + gl.minimum(first, last_page)) * block_rows + head_row
        row1 = gl.load(table_ptr + gl.minimum(first + 1, last_page)) * block_rows + head_row
        row2 = gl.load(table_ptr + gl.minimum(first + 2, last_page)) * block_rows + head_row
        row3 = gl.load(table_ptr + gl.minimum(first + 3, last_page)) * block_rows + head_row
        _fill(k_desc, row0, row1, row2, row3, k_tiles, k_ready, k_free, tile)
        _fill(v_desc, row0, row1, row2, row3, v_tiles, v_ready, v_free, tile)


@gluon.jit
def _multiply_keys(q, tiles, ready, tile, nothing):
    """Start scores = q k for a tile's four blocks."""
    slot = tile % _STAGES
    at = slot * _PAGES
    mbarrier.wait(ready.index(slot), (tile // _STAGES) & 1)
    s0 = warpgroup_mma(q, tiles.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s1 = warpgroup_mma(q, tiles.index(at + 1).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s2 = warpgroup_mma(q, tiles.index(at + 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s3 = warpgroup_mma(q, tiles.index(at + 3).permute((1, 0)), nothing, use_acc=False, is_async=True)
    return s0, s1, s2, s3


@gluon.jit
def _multiply_values(w0, w1, w2, w3, tiles, ready, tile, accumulated):
    """Start out += weights v for a tile's four blocks."""
    slot = tile % _STAGES
    at = slot * _PAGES
    mbarrier.wait(ready.index(slot), (tile // _STAGES) & 1)
    accumulated = warpgroup_mma(w0, tiles.index(at), accumulated, is_async=True)
    accumulated = warpgroup_mma(w1, tiles.index(at + 1), accumulated, is_async=True)
    accumulated = warpgroup_mma(w2, tiles.index(at + 2), accumulated, is_async=True)
    return warpgroup_mma(w3, tiles.index(at + 3), accumulated, is_async=True)


@gluon.jit
def _masked(scores, first_key, positions):
    """Scores of keys past a query's position become -inf."""
    keys = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    return gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))


@gluon.jit
def _weigh(s0, s1, s2, s3, first_key, MASKED, positions, highest, total, scale_log2):
    """The running softmax over a tile. Returns weights, the new maximum and sum, and by how much older sums shrink."""
    if MASKED:
        page: gl.constexpr = s0.shape[1]
        s0 = _masked(s0, first_key, positions)
        s1 = _masked(s1, first_key + page, positions)
        s2 = _masked(s2, first_key + 2 * page, positions)
        s3 = _masked(s3, first_key + 3 * page, positions)
    most = gl.max(gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3)), axis=1)
    new_highest = gl.maximum(highest, most * scale_log2)
    shrink = gl.exp2(highest - new_highest)
    s0 = gl.exp2(s0 * scale_log2 - new_highest[:, None])
    s1 = gl.exp2(s1 * scale_log2 - new_highest[:, None])
    s2 = gl.exp2(s2 * scale_log2 - new_highest[:, None])
    s3 = gl.exp2(s3 * scale_log2 - new_highest[:, None])
    total = total * shrink + gl.sum((s0 + s1) + (s2 + s3), axis=1)
    return s0, s1, s2, s3, new_highest, total, shrink


@gluon.jit
def _attend(
    WARPGROUP: gl.constexpr,
    q_ptr, out_ptr, q_stride, out_stride, row_start, first_token, query_len, context, kv_head, num_tiles, scale_log2,
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 pairs against every tile of keys.

    Every query sees key 0, so that its maximum is finite from tile 0 on. Pairs that no query uses are zeros in q: what
    they come to is not stored.
    """
    PAIRS: gl.constexpr = _PAIRS // 2
    PAGE: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, k_width=2)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, k_width=2)
    of_scores: gl.constexpr = gl.SliceLayout(1, scores_layout)
    of_out: gl.constexpr = gl.SliceLayout(1, out_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])

    pairs = WARPGROUP * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, wide))
    tokens = first_token + pairs // GROUP
    used = (pairs < (_PAIRS // GROUP) * GROUP) & (tokens < query_len)
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    offsets = (row_start + tokens).to(gl.int64) * q_stride + (kv_head * GROUP + pairs % GROUP) * HEAD_DIM
    q = gl.load(q_ptr + offsets[:, None] + columns[None, :], mask=used[:, None], other=0.0)
    q = gl.convert_layout(q, q_layout)

    first_position = context - query_len + first_token
    positions = first_position + (WARPGROUP * PAIRS + gl.arange(0, PAIRS, of_scores)) // GROUP
    tile_keys: gl.constexpr = _PAGES * PAGE
    unmasked_tiles = (first_position + 1) // tile_keys

    highest = gl.full([PAIRS], float("-inf"), gl.float32, of_scores)
    total = gl.full([PAIRS], 0.0, gl.float32, of_scores)
    accumulated = gl.zeros([PAIRS, HEAD_DIM], gl.float32, out_layout)
    nothing = gl.zeros([PAIRS, PAGE], gl.float32, scores_layout)

    s0, s1, s2, s3 = _multiply_keys(q, k_tiles, k_ready, 0, nothing)
    s0, s1, s2, s3 = warpgroup_mma_wait(0, deps=[s0, s1, s2, s3])
    mbarrier.arrive(k_free.index(0), count=1)
    s0, s1, s2, s3, highest, total, shrink = _weigh(
        s0, s1, s2, s3, 0, unmasked_tiles == 0, positions, highest, total, scale_log2
    )
    w0 = gl.convert_layout(s0.to(q.dtype), weights_layout)
    w1 = gl.convert_layout(s1.to(q.dtype), weights_layout)
    w2 = gl.convert_layout(s2.to(q.dtype), weights_layout)
    w3 = gl.convert_layout(s3.to(q.dtype), weights_layout)
    for tile in range(1, num_tiles):
        s0, s1, s2, s3 = _multiply_keys(q, k_tiles, k_ready, tile, nothing)
        accumulated = _multiply_values(w0, w1, w2, w3, v_tiles, v_ready, tile - 1, accumulated)
        s0, s1, s2, s3 = warpgroup_mma_wait(_PAGES, deps=[s0, s1, s2, s3])
        mbarrier.arrive(k_free.index(tile % _STAGES), count=1)
        s0, s1, s2, s3, highest, total, shrink = _weigh(
            s0, s1, s2, s3, tile * tile_keys, tile >= unmasked_tiles, positions, highest, total, scale_log2
        )
        accumulated = warpgroup_mma_wait(0, deps=[accumulated])
        mbarrier.arrive(v_free.index((tile - 1) % _STAGES), count=1)
        accumulated = accumulated * gl.convert_layout(shrink, of_out)[:, None]
        w0 = gl.convert_layout(s0.to(q.dtype), weights_layout)
        w1 = gl.convert_layout(s1.to(q.dtype), weights_layout)
        w2 = gl.convert_layout(s2.to(q.dtype), weights_layout)
        w3 = gl.convert_layout(s3.to(q.dtype), weights_layout)
    accumulated = _multiply_values(w0, w1, w2, w3, v_tiles, v_ready, num_tiles - 1, accumulated)
    accumulated = warpgroup_mma_wait(0, deps=[accumulated])

    out = accumulated / gl.convert_layout(total, of_out)[:, None]
    pairs_out = WARPGROUP * PAIRS + gl.arange(0, PAIRS, of_out)
    tokens_out = first_token + pairs_out // GROUP
    used_out = (pairs_out < (_PAIRS // GROUP) * GROUP) & (tokens_out < query_len)
    columns_out = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    offsets_out = (row_start + tokens_out).to(gl.int64) * out_stride
    offsets_out += (kv_head * GROUP + pairs_out % GROUP) * HEAD_DIM
    pointers = out_ptr + offsets_out[:, None] + columns_out[None, :]
    gl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=used_out[:, None])


@gluon.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_ptr", "context_lens_ptr"],
)
def _prefill_hopper_kernel(
    q_ptr,  # [T, Hq, D], tokens q_stride apart
    k_desc,  # the cache as rows of D values, in boxes of a block
    v_desc,  # as k_desc
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    slots_ptr,  # [R] int32
    query_start_ptr,  # [R + 1] int32
    context_lens_ptr,  # [R] int32
    out_ptr,  # [T, Hq, D], tokens out_stride apart
    q_stride,
    out_stride,
    block_rows,  # rows of the cache from a block to the next
    table_stride,
    num_rows,
    scale_log2,  # scale * log2(e): the softmax is taken in base 2
    GROUP: gl.constexpr,  # query heads a key head
):
    """Programs, and which queries each covers, as in _prefill_attention_kernel."""
    TOKENS: gl.constexpr = _PAIRS // GROUP
    kv_head = gl.program_id(0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)

    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    started = gl.zeros([128], gl.int32, row_layout)
    for first in range(0, num_rows, 128):
        candidates = first + gl.arange(0, 128, row_layout)
        begins = gl.load(query_start_ptr + candidates, mask=candidates < num_rows, other=0)
        started += ((begins // TOKENS + candidates <= tile) & (candidates < num_rows)).to(gl.int32)
    row = gl.sum(started, axis=0) - 1

    row_start = gl.load(query_start_ptr + row)
    query_len = gl.load(query_start_ptr + row + 1) - row_start
    first_token = (tile - row_start // TOKENS - row) * TOKENS
    if first_token >= query_len:
        return

    PAGE: gl.constexpr = k_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    context = gl.load(context_lens_ptr + row)
    table_ptr = block_tables_ptr + gl.load(slots_ptr + row).to(gl.int64) * table_stride
    key_end = gl.minimum(context - query_len + first_token + TOKENS, context)
    num_tiles = gl.cdiv(key_end, _PAGES * PAGE)
    last_page = (context - 1) // PAGE

    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [_STAGES * _PAGES, PAGE, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [_STAGES * _PAGES, PAGE, HEAD_DIM], v_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)  # an arrival of each warpgroup
        mbarrier.init(v_free.index(slot), count=2)

    gl.warp_specialize(
        [
            (_attend, (
                0, q_ptr, out_ptr, q_stride, out_stride, row_start, first_token, query_len, context, kv_head,
                num_tiles, scale_log2, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, GROUP,
            )),
            (_attend, (
                1, q_ptr, out_ptr, q_stride, out_stride, row_start, first_token, query_len, context, kv_head,
                num_tiles, scale_log2, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, GROUP,
            )),
            (_copy_tiles, (
                k_desc, v_desc, table_ptr, block_rows, kv_head * PAGE, num_tiles, last_page,
                k_tiles, v_tiles, k_ready, v_ready, k_free, v_free,
            )),
        ],
        [4, 1],  # warps of the second warpgroup and of the copies
        [240, 24],  # registers a thread; the first warpgroup gets what is left, 240 as well
    )  # fmt: skip


def suits(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the kernel can take these tensors: bf16 on a Hopper GPU, blocks and heads of the sizes it is made for."""
    return (
        is_hopper(q.device)
        and q.dtype == k_cache.dtype == torch.bfloat16
        and k_cache.shape[2] == PAGE
        and k_cache.shape[3] in HEAD_DIMS
    )


def prefill_hopper(
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
    """As prefill_attention, for tensors that suit."""
    tokens, num_heads, head_dim = q.shape
    blocks, kv_heads, page, _ = k_cache.shape
    group = num_heads // kv_heads
    block_rows = k_cache.stride(0) // head_dim
    rows = (blocks - 1) * block_rows + kv_heads * page
    k, v = (
        TensorDescriptor(cache, [rows, head_dim], [head_dim, 1], [page, head_dim], SWIZZLED)
        for cache in (k_cache, v_cache)
    )
    grid = (kv_heads, tokens // (_PAIRS.value // group) + slots.shape[0])
    _prefill_hopper_kernel[grid](
        q, k, v, block_tables, slots, query_start, context_lens, out,
        q.stride(0), out.stride(0), block_rows, block_tables.stride(0), slots.shape[0], scale * _LOG2_E,
        GROUP=group, num_warps=4, maxnreg=168, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out
