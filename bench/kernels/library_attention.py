"""Prefill attention beside torch's own, for first chunks, whose keys and values also lie dense: is the kernel the quicker one?

    python bench/kernels/library_attention.py

Torch's take q, k and v as they come from the projection, [B, H, T, D], all rows of equal length: they are spared the pages,
and rows of different lengths, which they would need padding for.
"""

from collections.abc import Callable
from functools import partial

import prefill_attention
import torch
from timing import DEVICE, ON_GPU, cases_for, report_rate, seconds_per_call
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = (
    {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if ON_GPU
    else {"math": SDPBackend.MATH}
)

# rows, query tokens (all keys there are), query heads, key heads, head size
CASES = [
    (16, 512, 32, 8, 128),
    (8, 1024, 32, 8, 128),
    (4, 2048, 32, 8, 128),
    (2, 4096, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (64, 128, 16, 8, 128),
    (32, 256, 16, 8, 128),
    (8, 1024, 16, 8, 128),
    (8, 1024, 12, 2, 128),
    (8, 1024, 32, 8, 64),
    (4, 2048, 32, 32, 96),
]  # fmt: skip
TINY = (2, 32, 4, 2, 64)


def library(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def calls_of(case: tuple[int, ...], backend: SDPBackend) -> list[Callable[[], Tensor]]:
    rows, tokens, num_heads, kv_heads, head_dim = case
    calls = []
    for _ in range(2):
        qkv = torch.randn(
            rows, tokens, num_heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE
        )
        q, k, v = (part.transpose(1, 2) for part in qkv.split((num_heads, kv_heads, kv_heads), dim=2))
        calls.append(partial(library, backend, q, k, v))
    return calls


def main() -> None:
    torch.manual_seed(0)
    for case in cases_for(CASES, TINY):
        rows, tokens, num_heads, kv_heads, head_dim = case
        seconds, flops = prefill_attention.measure((rows, tokens, tokens, num_heads, kv_heads, head_dim))
        shape = f"rows {rows} x {tokens} heads {num_heads}/{kv_heads}/{head_dim}"
        report_rate("prefill_attention", f"{shape} as a first chunk", flops, seconds)
        for name, backend in BACKENDS.items():
            try:
                seconds = seconds_per_call(calls_of(case, backend))
            except RuntimeError as error:  # a backend need not know every head size
                print(f"library_attention {shape} {name}: {str(error).splitlines()[0]}")
                continue
            report_rate("prefill_attention", f"{shape} by torch's {name}", flops, seconds)


if __name__ == "__main__":
    main()
