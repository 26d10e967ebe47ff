"""qk-norm, RoPE and KV write: bytes moved, against the copy bandwidth.  python bench/kernels/rope_cache.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.rope_cache import rope_and_cache

BLOCK_SIZE = 32

# tokens, query heads, key heads, head size, with qk-norm
CASES = [
    (8192, 32, 8, 128, False),
    (8192, 16, 8, 128, True),
    (1024, 32, 8, 128, False),
    (1024, 16, 8, 128, True),
    (256, 32, 8, 128, False),
    (4096, 9, 3, 64, False),
]
TINY = (32, 4, 2, 64, True)


def main() -> None:
    for tokens, num_heads, kv_heads, head_dim, normed in cases_for(CASES, TINY):
        width = (num_heads + 2 * kv_heads) * head_dim
        num_bytes = tokens * (width * 4 + head_dim * 4)
        cos_sin = torch.randn(32768, head_dim, device=DEVICE)
        norms = torch.randn(2, head_dim, dtype=torch.bfloat16, device=DEVICE) if normed else (None, None)
        calls = []
        for _ in range(copies_for(num_bytes)):
            qkv = torch.randn(tokens, width, dtype=torch.bfloat16, device=DEVICE)
            caches = torch.zeros(
                2, tokens // BLOCK_SIZE, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=DEVICE
            )
            positions = torch.randint(0, 32768, (tokens,), device=DEVICE)
            mapping = torch.randperm(tokens, device=DEVICE)
            arguments = (qkv, positions, cos_sin, *caches, mapping, num_heads, kv_heads, *norms)
            calls.append(lambda arguments=arguments: rope_and_cache(*arguments))
        shape = f"{tokens} heads {num_heads}/{kv_heads}/{head_dim}{' normed' if normed else ''}"
        report_bandwidth("rope_and_cache", shape, num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
