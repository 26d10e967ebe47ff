# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sums of runs of rows: what pooling the hidden states of several prompts comes down to.

y_q = sum_{i < length_q} x_{start_q + i}        added up in fp32, row by row
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, cdiv, check, next_power_of_2, use_triton


@triton.jit
def _segment_sum_kernel(
    x_ptr,  # [T, H], rows row_stride apart
    start_ptr,  # [Q] int32
    length_ptr,  # [Q] int32
    y_ptr,  # [Q, H] fp32
    row_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per run and block of columns."""
    run = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    row_ptr = x_ptr + tl.load(start_ptr + run).to(tl.int64) * row_stride
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.load(length_ptr + run)):
        total += tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        row_ptr += row_stride
    tl.store(y_ptr + run * H + columns, total, mask=mask)


def segment_sum(x: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Sums of Q runs of rows. x: [T, H]; start, length: [Q] int32, each run inside [0, T). Returns [Q, H] fp32."""
    check(x.dim() == 2 and x.stride(1) == 1, "x must be [T, H], contiguous along H")
    check(len(start) == len(length), "start and length must be equally long")
    if not use_triton(x):
        return segment_sum_reference(x, start, length)
    width = x.shape[1]
    y = torch.empty(len(start), width, dtype=torch.float32, device=x.device)
    if len(start):
        block = min(next_power_of_2(width), 512)
        grid = (len(start), cdiv(width, block))
        _segment_sum_kernel[grid](
            x, start, length, y, x.stride(0), H=width, BLOCK=block, num_warps=4, **LAUNCH_OPTIONS
        )
    return y


def segment_sum_reference(x: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """segment_sum in plain torch."""
    runs = zip(start.tolist(), length.tolist(), strict=True)
    sums = [x[first : first + count].float().sum(dim=0) for first, count in runs]
    return torch.stack(sums) if sums else torch.empty(0, x.shape[1])
