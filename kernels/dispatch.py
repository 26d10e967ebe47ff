"""Which path a launcher takes."""

from functools import cache

import torch
import triton
from torch import Tensor

# Under TRITON_INTERPRET=1 the kernels below run on the CPU, in numpy: that is how they are tested without a GPU.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# Options of every launch. Later releases of Triton fuse a * b + c only where they are asked to.
LAUNCH_OPTIONS = {"enable_fp_fusion": True}


def use_triton(x: Tensor) -> bool:
    """Whether x belongs to a Triton kernel (a CUDA tensor, or any tensor in the interpreter)."""
    return x.is_cuda or INTERPRETED


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs side by side at least; a small number in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# Triton has both, but as functions of its compiler: a launcher in Python that calls them pays for that every time.
def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, which is 1 or more."""
    return 1 << (n - 1).bit_length()


def check(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless condition holds."""
    if not condition:
        raise ValueError(message)
