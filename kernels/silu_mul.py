# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The gated activation of a Llama-style feed-forward layer.

    y = round(silu(gate)) * up          gate_up: [T, 2I], gate in the first half; y: [T, I]

silu is taken in fp32 and rounded to the dtype before the product, as Transformers does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.dispatch import LAUNCH_OPTIONS, cdiv, check, next_power_of_2, use_triton


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [T, 2I], rows row_stride apart
    y_ptr,  # [T, I] contiguous
    row_stride,
    intermediate,
    BLOCK: tl.constexpr,
):
    """One program covers BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate

    gate_row = gate_up_ptr + row * row_stride
    gate = tl.load(gate_row + columns, mask=mask, other=0.0)
    up = tl.load(gate_row + intermediate + columns, mask=mask, other=0.0)

    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * intermediate + columns, (silu * up.to(tl.float32)).to(gate.dtype), mask=mask)


def silu_mul(gate_up: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """silu(gate) * up for gate_up [T, 2I] (rows may be strided). Returns [T, I].

    batch_invariant: a row's bits do not depend on the number of rows; on a GPU they never do.
    """
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up must be [T, 2I]")
    check(gate_up.stride(-1) == 1, "gate_up must be contiguous along its last dimension")
    if not use_triton(gate_up):
        return _silu_mul_row_by_row(gate_up) if batch_invariant else silu_mul_reference(gate_up)
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(next_power_of_2(intermediate), 1024)
        grid = (tokens, cdiv(intermediate, block))
        _silu_mul_kernel[grid](
            gate_up, y, gate_up.stride(0), intermediate, BLOCK=block, num_warps=4, **LAUNCH_OPTIONS
        )
    return y


def _silu_mul_row_by_row(gate_up: Tensor) -> Tensor:
    """Torch's exponential of what fills a vector differs in the last bit from that of what is left over at the end of a
    thread's share, and where the shares end depends on the number of rows."""
    y = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for row, out in zip(gate_up.split(1), y.split(1), strict=True):
        out.copy_(silu_mul_reference(row))
    return y


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """silu_mul in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
