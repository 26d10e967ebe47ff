# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""gate_up's product with silu_mul in it, for Hopper GPUs: what the product gives never goes to memory.

    y = round(silu(round(x G^T))) * round(x U^T)        x: [T, H]; G, U: [I, H], one after the other; y: [T, I]

One program for each multiprocessor: they go through tiles of 128 rows and 128 columns of y in rounds. A last round that
would leave half of them or more without a tile is cut into tiles of 64 columns.

One of a program's warps keeps a ring in shared memory filled with 64 terms at a time of x, G and U (by the tensor memory
accelerator). Two warpgroups multiply, each 64 of the rows by the tile's columns of G and the same columns of U, which meet
in one thread's registers: the activation needs nothing from another thread.

Each place of the ring has two barriers, as in prefill_hopper: ``ready`` when the copies have arrived, ``free`` when both
warpgroups are done with them.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, cdiv, multiprocessors
from headrace.kernels.hopper import SWIZZLED, copy_in, copy_out, is_hopper

_ROWS = gl.constexpr(128)  # of a tile
_COLUMNS = gl.constexpr(64)  # of half a tile
_TERMS = gl.constexpr(64)  # of a place in the ring
_STAGES = gl.constexpr(4)  # places in the ring
_TOGETHER = gl.constexpr(16)  # row tiles that go through the columns together, with the weights in the cache


@gluon.jit
def _place_of(number, row_tiles, column_tiles):
    """First row and column of a tile."""
    a_group = _TOGETHER * column_tiles
    first = number // a_group * _TOGETHER
    rows = gl.minimum(row_tiles - first, _TOGETHER)
    within = number % a_group
    return (first + within % rows) * _ROWS, within // rows * (2 * _COLUMNS)


@gluon.jit
def _copy_tile(
    x_desc, w_desc, row, column, num_steps, intermediate, x_tiles, w_tiles, ready, free, step,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Copy the terms of a tile, or of half a tile. Returns the ring's next step."""
    for term in range(0, num_steps * _TERMS, _TERMS):
        slot = step % _STAGES
        bar, w_tile = ready.index(slot), w_tiles.index(slot)
        mbarrier.wait(free.index(slot), ((step // _STAGES) & 1) ^ 1)
        mbarrier.expect(bar, x_desc.block_type.nbytes + 2 * HALVES * w_desc.block_type.nbytes)
        copy_in(x_desc, [row, term], bar, x_tiles.index(slot))
        for half in gl.static_range(HALVES):
            at = column + half * _COLUMNS
            copy_in(w_desc, [at, term], bar, w_tile.slice(half * _COLUMNS, _COLUMNS))
            copy_in(
                w_desc, [intermediate + at, term], bar, w_tile.slice((HALVES + half) * _COLUMNS, _COLUMNS)
            )
        step += 1
    return step


@gluon.jit
def _copy_terms(
    x_desc,
    w_desc,
    row_tiles,
    column_tiles,
    whole_tiles,
    num_steps,
    intermediate,
    x_tiles,
    w_tiles,
    ready,
    free,
):
    """The copying warp."""
    step = 0
    for number in range(gl.program_id(0), whole_tiles, gl.num_programs(0)):
        row, column = _place_of(number, row_tiles, column_tiles)
        step = _copy_tile(
            x_desc, w_desc, row, column, num_steps, intermediate, x_tiles, w_tiles, ready, free, step, 2
        )
    halves = 2 * (row_tiles * column_tiles - whole_tiles)
    for half in range(gl.program_id(0), halves, gl.num_programs(0)):
        row, column = _place_of(whole_tiles + half // 2, row_tiles, column_tiles)
        column += half % 2 * _COLUMNS
        step = _copy_tile(
            x_desc, w_desc, row, column, num_steps, intermediate, x_tiles, w_tiles, ready, free, step, 1
        )


@gluon.jit
def _multiply_tile(
    WARPGROUP: gl.constexpr, y_desc, row, column, num_steps, x_tiles, w_tiles, y_tiles, ready, free, step,
    HALVES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's 64 rows of a tile, or of half a tile. Returns the ring's next step."""
    ROWS: gl.constexpr = _ROWS // 2
    COLUMNS: gl.constexpr = HALVES * _COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    total = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, layout)
    for at in range(num_steps):
        slot = step % _STAGES
        mbarrier.wait(ready.index(slot), (step // _STAGES) & 1)
        x = x_tiles.index(slot).slice(WARPGROUP * ROWS, ROWS)
        w = w_tiles.index(slot).slice(0, 2 * COLUMNS).permute((1, 0))
        total = warpgroup_mma(x, w, total, use_acc=at > 0, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1, pred=at > 0)
        step += 1
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1)

    gate, up = total.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
    gate = gate.to(y_desc.dtype).to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(y_desc.dtype).to(gl.float32)
    y = (silu * up.to(y_desc.dtype).to(gl.float32)).to(y_desc.dtype)
    tma.store_wait(0)  # the last tile is out of its place
    if HALVES == 2:
        left, right = y.reshape([ROWS, 2, _COLUMNS]).permute((0, 2, 1)).split()
        y_tiles.index(2 * WARPGROUP).store(left)
        y_tiles.index(2 * WARPGROUP + 1).store(right)
    else:
        y_tiles.index(2 * WARPGROUP).store(y)
    fence_async_shared()
    for half in gl.static_range(HALVES):
        copy_out(
            y_desc, [row + WARPGROUP * ROWS, column + half * _COLUMNS], y_tiles.index(2 * WARPGROUP + half)
        )
    return step


@gluon.jit
def _multiply(
    WARPGROUP: gl.constexpr, y_desc, row_tiles, column_tiles, whole_tiles, num_steps,
    x_tiles, w_tiles, y_tiles, ready, free,
):  # fmt: skip
    """One warpgroup: its 64 rows of every tile."""
    step = 0
    for number in range(gl.program_id(0), whole_tiles, gl.num_programs(0)):
        row, column = _place_of(number, row_tiles, column_tiles)
        step = _multiply_tile(
            WARPGROUP, y_desc, row, column, num_steps, x_tiles, w_tiles, y_tiles, ready, free, step, 2
        )
    halves = 2 * (row_tiles * column_tiles - whole_tiles)
    for half in range(gl.program_id(0), halves, gl.num_programs(0)):
        row, column = _place_of(whole_tiles + half // 2, row_tiles, column_tiles)
        column += half % 2 * _COLUMNS
        step = _multiply_tile(
            WARPGROUP, y_desc, row, column, num_steps, x_tiles, w_tiles, y_tiles, ready, free, step, 1
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles", "whole_tiles"])
def _swiglu_hopper_kernel(
    x_desc,  # [T, H] in boxes of _ROWS rows and _TERMS terms
    w_desc,  # [2 I, H] in boxes of _COLUMNS rows and _TERMS terms
    y_desc,  # [T, I] in boxes of half as many rows, and _COLUMNS columns
    row_tiles,
    column_tiles,
    whole_tiles,  # the tiles before those that are cut in two
    num_steps,  # of _TERMS terms
    intermediate,
):
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [_STAGES, _ROWS, _TERMS], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [_STAGES, 4 * _COLUMNS, _TERMS], w_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [4, _ROWS // 2, _COLUMNS], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)  # an arrival of each warpgroup

    gl.warp_specialize(
        [
            (_multiply, (
                0, y_desc, row_tiles, column_tiles, whole_tiles, num_steps, x_tiles, w_tiles, y_tiles, ready, free,
            )),
            (_multiply, (
                1, y_desc, row_tiles, column_tiles, whole_tiles, num_steps, x_tiles, w_tiles, y_tiles, ready, free,
            )),
            (_copy_terms, (
                x_desc, w_desc, row_tiles, column_tiles, whole_tiles, num_steps, intermediate,
                x_tiles, w_tiles, ready, free,
            )),
        ],
        [4, 1],  # warps of the second warpgroup and of the copies
        [240, 24],  # registers a thread; the first warpgroup gets what is left, 240 as well
    )  # fmt: skip


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can take these tensors: bf16 on a Hopper GPU, of sizes that the copies can step over."""
    return (
        is_hopper(x.device)
        and x.dtype == weight.dtype == torch.bfloat16
        and x.shape[1] % _TERMS.value == 0
        and weight.shape[0] % 16 == 0
        and _can_be_copied(x)
        and _can_be_copied(weight)
    )


def _can_be_copied(matrix: Tensor) -> bool:
    """Whether its rows are contiguous and each begins at a multiple of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and int(matrix.storage_offset()) % 8 == 0


def whole_tiles(tiles: int, programs: int) -> int:
    """How many of so many tiles stay whole: all but a last round's that half the programs or fewer would have."""
    in_last_round = tiles % programs
    return tiles if 2 * in_last_round > programs else tiles - in_last_round


def share_used(tokens: int, intermediate: int, programs: int) -> float:
    """The share of the programs' time, in rounds of tiles, in which they have one to work on; half a tile takes 0.54 of
    a tile's time on an H200."""
    tiles = cdiv(tokens, _ROWS.value) * cdiv(intermediate, 2 * _COLUMNS.value)
    whole = whole_tiles(tiles, programs)
    rounds = cdiv(whole, programs) + (0.54 if whole < tiles else 0)
    return tiles / programs / rounds


def swiglu_hopper(x: Tensor, weight: Tensor) -> Tensor:
    """As swiglu, without a bias, for tensors that suit."""
    (tokens, hidden), intermediate = x.shape, weight.shape[0] // 2
    y = torch.empty((tokens, intermediate), dtype=x.dtype, device=x.device)
    rows, columns, terms = _ROWS.value, _COLUMNS.value, _TERMS.value
    x_desc, w_desc, y_desc = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, SWIZZLED)
        for tensor, box in ((x, [rows, terms]), (weight, [columns, terms]), (y, [rows // 2, columns]))
    )
    row_tiles, column_tiles = cdiv(tokens, rows), cdiv(intermediate, 2 * columns)
    programs = multiprocessors(x.device)
    _swiglu_hopper_kernel[(programs,)](
        x_desc, w_desc, y_desc, row_tiles, column_tiles, whole_tiles(row_tiles * column_tiles, programs),
        hidden // terms, intermediate, num_warps=4, maxnreg=168, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return y
