# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""prefill_attention for Hopper GPUs: the same sums, each kind of work on warps of its own.

A piece of work is a tile of query tokens (query_tiles.py) and a key head: up to 128 (token, head) pairs. There is one
program a multiprocessor; each draws pieces from a common counter until none is left, of a row those with most keys first.

One of a program's warps keeps a ring of tiles of keys and values in shared memory filled (by the tensor memory accelerator:
a cache block a copy, no addresses in anybody's registers), and goes on to the next piece as soon as there is room: short
pieces would otherwise spend most of their time beginning and ending. Two warpgroups multiply, each with 64 of a piece's
pairs. Within a warpgroup the products of one tile run while the last tile's scores are exponentiated:

    scores_t = q k_t            in flight together with
    out     += weights_{t-1} v_{t-1}
    weights_t = exp2(scores_t - max)       while the second product is still running

A tile is four cache blocks, each a product of its own, so that a tile's blocks need not be neighbours. A program counts its
tiles over all of its pieces: that of number ``step`` stands in place step mod 3 of the ring, keys and values apart, each place
with two barriers:

    ready   completes when the copies of a tile have arrived; both warpgroups wait for it
    free    completes when both warpgroups are done with a tile; the copying warp waits for it before the next one

Beside the keys of a piece's first tile stands which piece it is: the copying warp alone draws, and the warpgroups read it
there.

A barrier knows only whether it has completed an odd or an even number of times (its parity). At a step, place step mod 3
is in its round step div 3: ``ready`` has completed that often before, so its waiters wait for parity (step div 3) mod 2. ``free`` is
one round behind, so its waiter waits for the other parity, which a barrier that has never completed passes at once.

Values past a row's last key, up to the end of their block, are multiplied by zero, not left out. They are what the block's
last owner wrote there, and finite, as rope_and_cache sees to: a NaN among them would be in the new owner's sums too.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, multiprocessors
from headrace.kernels.hopper import SWIZZLED, copy_in, is_hopper
from headrace.kernels.query_tiles import QueryTiles, tile_queries

PAGE = 32
"""The cache's block size that the kernel is made for."""
HEAD_DIMS = (64, 128)

_LOG2_E = 1.4426950408889634
_PAIRS = gl.constexpr(128)  # (token, head) pairs of a piece at most, half of them a warpgroup's
_PAGES = gl.constexpr(4)  # cache blocks of a tile
_STAGES = gl.constexpr(3)  # tiles of the ring


@gluon.jit
def _fill(desc, row0, row1, row2, row3, tiles, ready, free, step):
    """Copy four blocks into a tile's place in the ring, once both warpgroups are done with what was there."""
    slot = step % _STAGES
    at = slot * _PAGES
    bar = ready.index(slot)
    mbarrier.wait(free.index(slot), ((step // _STAGES) & 1) ^ 1)
    mbarrier.expect(bar, _PAGES * desc.block_type.nbytes)
    copy_in(desc, [row0, 0], bar, tiles.index(at))
    copy_in(desc, [row1, 0], bar, tiles.index(at + 1))
    copy_in(desc, [row2, 0], bar, tiles.index(at + 2))
    copy_in(desc, [row3, 0], bar, tiles.index(at + 3))


@gluon.jit
def _tell(pieces, free, step, token, left, position, kv_head):
    """Write beside a piece's first tile which piece it is, for ``_hear``, once its place in the ring is free."""
    slot = step % _STAGES
    mbarrier.wait(free.index(slot), ((step // _STAGES) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pieces.index(slot * 4).store(gl.full([1], token, gl.int32, layout))
    pieces.index(slot * 4 + 1).store(gl.full([1], left, gl.int32, layout))
    pieces.index(slot * 4 + 2).store(gl.full([1], position, gl.int32, layout))
    pieces.index(slot * 4 + 3).store(gl.full([1], kv_head, gl.int32, layout))


@gluon.jit
def _hear(pieces, ready, step):
    """The piece whose first tile is a program's tile ``step``: its first token, how many tokens its row has from there on
    (0: there are no more pieces), the first token's position, and the key head."""
    slot = step % _STAGES
    mbarrier.wait(ready.index(slot), (step // _STAGES) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = gl.sum(pieces.index(slot * 4).load(layout), axis=0)
    left = gl.sum(pieces.index(slot * 4 + 1).load(layout), axis=0)
    position = gl.sum(pieces.index(slot * 4 + 2).load(layout), axis=0)
    kv_head = gl.sum(pieces.index(slot * 4 + 3).load(layout), axis=0)
    return token, left, position, kv_head


@gluon.jit
def _copy_pieces(
    k_desc, v_desc, block_tables_ptr, table_stride, block_rows, tiles_ptr, progress_ptr, kv_heads,
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, pieces, TOKENS: gl.constexpr,
):  # fmt: skip
    """The copying warp. Past a piece's last block that block is copied again: nobody sees those keys."""
    PAGE: gl.constexpr = k_desc.block_type.shape[0]
    num_tiles = gl.load(progress_ptr)
    num_pieces = num_tiles * kv_heads
    step = 0
    piece = gl.program_id(0)
    while piece < num_pieces:
        # A row's last tiles see the most keys: they come first, so that the work does not end on a long one.
        entry = tiles_ptr + (num_tiles - 1 - piece // kv_heads) * 4
        kv_head = piece % kv_heads
        token, left, position = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        table_ptr = block_tables_ptr + gl.load(entry + 3).to(gl.int64) * table_stride
        last_page = (position + gl.minimum(left, TOKENS) - 1) // PAGE
        _tell(pieces, k_free, step, token, left, position, kv_head)
        for first in range(0, last_page + 1, _PAGES):
            head_row = kv_head * PAGE
            row0 = gl.load(table_ptr + first) * block_rows + head_row
            row1 = gl.load(table_ptr + gl.minimum(first + 1, last_page)) * block_rows + head_row
            row2 = gl.load(table_ptr + gl.minimum(first + 2, last_page)) * block_rows + head_row
            row3 = gl.load(table_ptr + gl.minimum(first + 3, last_page)) * block_rows + head_row
            _fill(k_desc, row0, row1, row2, row3, k_tiles, k_ready, k_free, step)
            _fill(v_desc, row0, row1, row2, row3, v_tiles, v_ready, v_free, step)
            step += 1
        # A program's first piece is that of its own number; then it draws once for each that it has copied. That makes
        # num_pieces draws, whatever the number of programs: the one that gets num_pieces - 1 is the last.
        drawn = gl.atomic_add(progress_ptr + 1, 1, sem="relaxed")
        if drawn == num_pieces - 1:
            gl.store(progress_ptr + 1, 0)  # for the next launch
        piece = drawn + gl.num_programs(0)
    _tell(pieces, k_free, step, 0, 0, 0, 0)
    mbarrier.arrive(k_ready.index(step % _STAGES), count=1)


@gluon.jit
def _multiply_keys(q, tiles, ready, step, nothing):
    """Start scores = q k for a tile's four blocks."""
    slot = step % _STAGES
    at = slot * _PAGES
    mbarrier.wait(ready.index(slot), (step // _STAGES) & 1)
    s0 = warpgroup_mma(q, tiles.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s1 = warpgroup_mma(q, tiles.index(at + 1).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s2 = warpgroup_mma(q, tiles.index(at + 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s3 = warpgroup_mma(q, tiles.index(at + 3).permute((1, 0)), nothing, use_acc=False, is_async=True)
    return s0, s1, s2, s3


@gluon.jit
def _multiply_values(w0, w1, w2, w3, tiles, ready, step, accumulated):
    """Start out += weights v for a tile's four blocks."""
    slot = step % _STAGES
    at = slot * _PAGES
    mbarrier.wait(ready.index(slot), (step // _STAGES) & 1)
    accumulated = warpgroup_mma(w0, tiles.index(at), accumulated, is_async=True)
    accumulated = warpgroup_mma(w1, tiles.index(at + 1), accumulated, is_async=True)
    accumulated = warpgroup_mma(w2, tiles.index(at + 2), accumulated, is_async=True)
    return warpgroup_mma(w3, tiles.index(at + 3), accumulated, is_async=True)


@gluon.jit
def _masked(scores, last):
    """Scores of keys past the last that a query sees become -inf. Keys count from the first of the scores."""
    keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    return gl.where(keys[None, :] <= last[:, None], scores, float("-inf"))


@gluon.jit
def _weigh(s0, s1, s2, s3, first_key, MASKED, positions, highest, total, scale_log2):
    """The running softmax over a tile. Returns weights, the new maximum and sum, and by how much older sums shrink."""
    if MASKED:
        page: gl.constexpr = s0.shape[1]
        last = positions - first_key
        s0 = _masked(s0, last)
        s1 = _masked(s1, last - page)
        s2 = _masked(s2, last - 2 * page)
        s3 = _masked(s3, last - 3 * page)
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
def _as_operands(s0, s1, s2, s3, dtype: gl.constexpr, layout: gl.constexpr):
    """A tile's weights as the product with its values takes them."""
    w0 = gl.convert_layout(s0.to(dtype), layout)
    w1 = gl.convert_layout(s1.to(dtype), layout)
    w2 = gl.convert_layout(s2.to(dtype), layout)
    w3 = gl.convert_layout(s3.to(dtype), layout)
    return w0, w1, w2, w3


@gluon.jit
def _places_of(
    WARPGROUP: gl.constexpr, token, left, kv_head, stride, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Where in q or out, [T, Hq, D], a warpgroup's pairs of a piece are, and which of them there are."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    pairs = WARPGROUP * (_PAIRS // 2) + gl.arange(0, _PAIRS // 2, gl.SliceLayout(1, wide))
    tokens, columns = pairs // GROUP, gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    there = (pairs < (_PAIRS // GROUP) * GROUP) & (tokens < left)
    heads = (token + tokens).to(gl.int64) * stride + (kv_head * GROUP + pairs % GROUP) * HEAD_DIM
    return heads[:, None] + columns[None, :], there[:, None]


@gluon.jit
def _attend(
    WARPGROUP: gl.constexpr,
    q_ptr, out_ptr, q_stride, out_stride, scale_log2,
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, pieces,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 pairs of each piece against every tile of keys.

    Every query sees key 0, so that its maximum is finite from tile 0 on. Pairs that no query uses are zeros in q: what
    they come to is not stored. The next piece's q is on its way while this one is brought to its end.
    """
    PAIRS: gl.constexpr = _PAIRS // 2
    PAGE: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    TILE_KEYS: gl.constexpr = _PAGES * PAGE
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, k_width=2)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, k_width=2)
    of_scores: gl.constexpr = gl.SliceLayout(1, scores_layout)
    of_out: gl.constexpr = gl.SliceLayout(1, out_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    nothing = gl.zeros([PAIRS, PAGE], gl.float32, scores_layout)

    step = 0
    token, left, first_position, kv_head = _hear(pieces, k_ready, step)
    q_places, q_there = _places_of(WARPGROUP, token, left, kv_head, q_stride, GROUP, HEAD_DIM)
    wide_q = gl.load(q_ptr + q_places, mask=q_there, other=0.0)
    while left > 0:
        q = gl.convert_layout(wide_q, q_layout)
        positions = first_position + (WARPGROUP * PAIRS + gl.arange(0, PAIRS, of_scores)) // GROUP
        num_tiles = gl.cdiv(first_position + gl.minimum(left, _PAIRS // GROUP), TILE_KEYS)
        unmasked_tiles = (first_position + 1) // TILE_KEYS
        highest = gl.full([PAIRS], float("-inf"), gl.float32, of_scores)
        total = gl.full([PAIRS], 0.0, gl.float32, of_scores)
        accumulated = gl.zeros([PAIRS, HEAD_DIM], gl.float32, out_layout)

        s0, s1, s2, s3 = _multiply_keys(q, k_tiles, k_ready, step, nothing)
        s0, s1, s2, s3 = warpgroup_mma_wait(0, deps=[s0, s1, s2, s3])
        mbarrier.arrive(k_free.index(step % _STAGES), count=1)
        s0, s1, s2, s3, highest, total, shrink = _weigh(
            s0, s1, s2, s3, 0, unmasked_tiles == 0, positions, highest, total, scale_log2
        )
        w0, w1, w2, w3 = _as_operands(s0, s1, s2, s3, q.dtype, weights_layout)
        for tile in range(1, num_tiles):
            step += 1
            s0, s1, s2, s3 = _multiply_keys(q, k_tiles, k_ready, step, nothing)
            accumulated = _multiply_values(w0, w1, w2, w3, v_tiles, v_ready, step - 1, accumulated)
            s0, s1, s2, s3 = warpgroup_mma_wait(_PAGES, deps=[s0, s1, s2, s3])
            mbarrier.arrive(k_free.index(step % _STAGES), count=1)
            s0, s1, s2, s3, highest, total, shrink = _weigh(
                s0, s1, s2, s3, tile * TILE_KEYS, tile >= unmasked_tiles, positions, highest, total, scale_log2,
            )  # fmt: skip
            accumulated = warpgroup_mma_wait(0, deps=[accumulated])
            mbarrier.arrive(v_free.index((step - 1) % _STAGES), count=1)
            accumulated = accumulated * gl.convert_layout(shrink, of_out)[:, None]
            w0, w1, w2, w3 = _as_operands(s0, s1, s2, s3, q.dtype, weights_layout)
        accumulated = _multiply_values(w0, w1, w2, w3, v_tiles, v_ready, step, accumulated)
        places, there = _places_of(WARPGROUP, token, left, kv_head, out_stride, GROUP, HEAD_DIM)
        next_token, left, first_position, next_kv_head = _hear(pieces, k_ready, step + 1)
        q_places, q_there = _places_of(WARPGROUP, next_token, left, next_kv_head, q_stride, GROUP, HEAD_DIM)
        wide_q = gl.load(q_ptr + q_places, mask=q_there, other=0.0)
        accumulated = warpgroup_mma_wait(0, deps=[accumulated])
        mbarrier.arrive(v_free.index(step % _STAGES), count=1)

        out = accumulated * gl.convert_layout(1.0 / total, of_out)[:, None]
        gl.store(out_ptr + places, gl.convert_layout(out.to(out_ptr.dtype.element_ty), wide), mask=there)
        token, kv_head = next_token, next_kv_head
        step += 1


@gluon.jit
def _prefill_hopper_kernel(
    q_ptr,  # [T, Hq, D], tokens q_stride apart
    k_desc,  # the cache as rows of D values, in boxes of a block
    v_desc,  # as k_desc
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    tiles_ptr,  # [C, 4] int32
    progress_ptr,  # [2] int32
    out_ptr,  # [T, Hq, D], tokens out_stride apart
    q_stride,
    out_stride,
    block_rows,  # rows of the cache from a block to the next
    table_stride,
    kv_heads,
    scale_log2,  # scale * log2(e): the softmax is taken in base 2
    GROUP: gl.constexpr,  # query heads a key head
):
    """One program a multiprocessor: its ring and barriers, and the warps that work with them."""
    PAGE: gl.constexpr = k_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [_STAGES * _PAGES, PAGE, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [_STAGES * _PAGES, PAGE, HEAD_DIM], v_desc.layout)
    pieces = gl.allocate_shared_memory(gl.int32, [_STAGES * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
                0, q_ptr, out_ptr, q_stride, out_stride, scale_log2,
                k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, pieces, GROUP,
            )),
            (_attend, (
                1, q_ptr, out_ptr, q_stride, out_stride, scale_log2,
                k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, pieces, GROUP,
            )),
            (_copy_pieces, (
                k_desc, v_desc, block_tables_ptr, table_stride, block_rows, tiles_ptr, progress_ptr, kv_heads,
                k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, pieces, _PAIRS // GROUP,
            )),
        ],
        [4, 1],  # warps of the second warpgroup and of the copies
        [240, 24],  # registers a thread; the first warpgroup gets what is left, 240 as well
    )  # fmt: skip


def suits(k_cache: Tensor) -> bool:
    """Whether the kernel can read this cache: bf16 on a Hopper GPU, blocks and heads of the sizes it is made for."""
    return (
        is_hopper(k_cache.device)
        and k_cache.dtype == torch.bfloat16
        and k_cache.shape[2] == PAGE
        and k_cache.shape[3] in HEAD_DIMS
    )


def hopper_tiles(
    slots: Tensor, query_start: Tensor, context_lens: Tensor, num_tokens: int, num_heads: int, k_cache: Tensor
) -> QueryTiles | None:
    """Tiles of a step's query tokens, as the kernel takes them. None where the cache does not suit it.

    slots, context_lens: [R] int32. query_start: [R + 1] int32; num_tokens bounds it. num_heads: of the queries.
    """
    if not suits(k_cache):
        return None
    tokens = int(_PAIRS.value) // (num_heads // k_cache.shape[1])
    return tile_queries(slots, query_start, context_lens, num_tokens, tokens)


def prefill_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    tiles: QueryTiles,
    scale: float,
    out: Tensor,
) -> Tensor:
    """As prefill_attention, for a cache that suits. tiles: of the rows' queries, by ``hopper_tiles``."""
    num_heads, head_dim = q.shape[1:]
    blocks, kv_heads, page, _ = k_cache.shape
    block_rows = k_cache.stride(0) // head_dim
    rows = (blocks - 1) * block_rows + kv_heads * page
    k, v = (
        TensorDescriptor(cache, [rows, head_dim], [head_dim, 1], [page, head_dim], SWIZZLED)
        for cache in (k_cache, v_cache)
    )
    _prefill_hopper_kernel[(multiprocessors(q.device),)](
        q, k, v, block_tables, tiles.table, tiles.progress, out,
        q.stride(0), out.stride(0), block_rows, block_tables.stride(0), kv_heads, scale * _LOG2_E,
        GROUP=num_heads // kv_heads, num_warps=4, maxnreg=168, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out
