# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A matrix product whose rows do not depend on how many there are, nor on one another.

    y = x W^T + b        x: [T, I]; W: [O, I]; b: [O]; y: [T, O]

Libraries choose their tiles, and whether to split the sum over I, by the number of rows: with other rows beside it, a
row's sums are taken in another order, and its last bits differ. Here the tile is the same for every number of rows, and
a tile's sums run over I from its beginning to its end. (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.dispatch import LAUNCH_OPTIONS, cdiv, check, use_triton

_CPU_ROWS = 16
"""Rows that the CPU multiplies at a time. Few, because a step with fewer pays for all of them."""


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x_ptr,  # [T, I], rows x_stride apart
    weight_ptr,  # [O, I] contiguous
    bias_ptr,  # [O], read when HAS_BIAS
    y_ptr,  # [T, O] contiguous
    x_stride,
    num_rows,
    in_features,
    out_features,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program covers BLOCK_M rows and BLOCK_N columns of y. Those that share columns run side by side."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    terms = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < out_features

    x_row_ptr = x_ptr + rows[:, None] * x_stride
    weight_row_ptr = weight_ptr + columns[:, None] * in_features
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        at = start + terms
        is_term = (at < in_features)[None, :]
        x = tl.load(x_row_ptr + at[None, :], mask=is_row[:, None] & is_term, other=0.0)
        weight = tl.load(weight_row_ptr + at[None, :], mask=is_column[:, None] & is_term, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")

    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(
        y_ptr + rows[:, None] * out_features + columns[None, :], y, mask=is_row[:, None] & is_column[None, :]
    )


class Tile(NamedTuple):
    """How a program is laid out: rows and columns of y, terms at a time, warps, tiles in flight."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def _tile(itemsize: int) -> Tile:
    """The tile for values of a size in bytes; it must depend on nothing else."""
    if itemsize > 2:
        return Tile(rows=32, columns=64, terms=32, warps=4, stages=2)
    return Tile(rows=64, columns=128, terms=64, warps=4, stages=4)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] (rows may be strided) times weight [O, I] transposed, plus bias [O]. Returns [T, O]."""
    check(x.dim() == 2 and weight.shape[1:] == x.shape[1:], "x must be [T, I] and weight [O, I]")
    check(x.stride(1) == 1 and weight.is_contiguous(), "x and weight must be contiguous along I")
    check(bias is None or bias.shape == weight.shape[:1], "bias must be [O]")
    if not use_triton(x):
        return _matmul_cpu(x, weight, bias)
    (tokens, in_features), out_features = x.shape, len(weight)
    y = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    if tokens:
        tile = _tile(x.itemsize)
        grid = (cdiv(tokens, tile.rows), cdiv(out_features, tile.columns))
        _matmul_kernel[grid](
            x, weight, bias, y, x.stride(0), tokens, in_features, out_features,
            HAS_BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.terms,
            num_warps=tile.warps, num_stages=tile.stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return y


def _matmul_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product of always as many rows, the last ones padded with zeros.

    That a row's place among them does not matter is the library's property: a test holds it to that.
    """
    tokens = len(x)
    padded = x.new_zeros(-(-tokens // _CPU_ROWS) * _CPU_ROWS, x.shape[1])
    padded[:tokens] = x
    y = x.new_empty(len(padded), len(weight))
    for rows, out in zip(padded.split(_CPU_ROWS), y.split(_CPU_ROWS), strict=True):
        out.copy_(F.linear(rows, weight, bias))
    return y[:tokens]


def matmul_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """matmul in plain torch."""
    return F.linear(x, weight, bias)
