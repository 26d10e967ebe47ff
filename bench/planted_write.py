"""A Triton kernel that writes past the end of a tensor: bench/sanitize.py runs it to see that memcheck sees it."""

import torch
import triton
import triton.language as tl


@triton.jit
def _planted_kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, SIZE), 1.0)


if __name__ == "__main__":
    x = torch.zeros(1 << 20, device="cuda")
    _planted_kernel[(1,)](x[-16:], SIZE=1024)
    torch.cuda.synchronize()
