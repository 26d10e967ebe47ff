"""What the kernels that are written for Hopper GPUs have in common."""

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Copies by the tensor memory accelerator, into shared memory and out of it. Later releases of Triton renamed them.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How a box of 16-bit values that it copies lies in shared memory, for the matrix units."""


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
