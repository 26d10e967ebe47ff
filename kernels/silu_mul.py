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

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, use_triton


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


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2I] (rows may be strided). Returns [T, I]."""
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up must be [T, 2I]")
    check(gate_up.stride(-1) == 1, "gate_up must be contiguous along its last dimension")
    if not use_triton(gate_up):
        return silu_mul_reference(gate_up)
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(triton.next_power_of_2(intermediate), 1024)
        grid = (tokens, triton.cdiv(intermediate, block))
        _silu_mul_kernel[grid](
            gate_up, y, gate_up.stride(0), intermediate, BLOCK=block, num_warps=4, **LAUNCH_OPTIONS
        )
    return y


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """silu_mul in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
