# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RMS norm, alone and fused with the residual addition before it.

    y = weight * round(x / sqrt(mean(x^2) + eps))          x, y: [T, H]; weight: [H]

The variance is taken in fp32; the normalised value is rounded to x's dtype before the product with the weight, and the
residual is rounded before it is normalised, as Transformers' Llama and Qwen do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, next_power_of_2, use_triton


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H], rows x_stride apart
    residual_ptr,  # [T, H], rows residual_stride apart; read and written when HAS_RESIDUAL
    weight_ptr,  # [H]
    y_ptr,  # [T, H] contiguous
    x_stride,
    residual_stride,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program normalises one row, held in registers from the only read to the only write."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_H)
    mask = columns < hidden

    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + row * residual_stride + columns
        residual = tl.load(residual_row, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_row, x, mask=mask)

    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    tl.store(y_ptr + row * hidden + columns, (normed * weight).to(x.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x [T, H] (rows may be strided) and scale it by weight [H]. Returns [T, H]."""
    _validate(x, weight)
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps)
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [T, H] to residual [T, H] in place, then normalise the sum. Returns [T, H]."""
    _validate(x, weight)
    check(residual.shape == x.shape and residual.dtype == x.dtype, "residual must have x's shape and dtype")
    check(residual.stride(-1) == 1, "residual must be contiguous along its last dimension")
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    return _launch(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm in plain torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """add_rms_norm in plain torch."""
    residual += x
    return rms_norm_reference(residual, weight, eps)


def _validate(x: Tensor, weight: Tensor) -> None:
    check(x.dim() == 2 and weight.shape == x.shape[1:], "x must be [T, H] and weight [H]")
    check(x.stride(-1) == 1 and weight.is_contiguous(), "x and weight must be contiguous along H")


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    tokens, hidden = x.shape
    y = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return y
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x, residual, weight, y,
        x.stride(0), residual.stride(0) if residual is not None else 0, hidden, eps,
        HAS_RESIDUAL=residual is not None, BLOCK_H=block,
        num_warps=min(max(block // 256, 1), 16),  # 8 values a thread: 16-byte loads
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return y
