"""The batch-invariant product against the library's, at the four products of qwen3-0.6b's layers.  python bench/kernels/matmul.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_rate, seconds_per_call
from torch.nn import functional as F

from headrace.kernels.matmul import matmul

# inputs, outputs, tokens
CASES = [
    (*features, tokens)
    for features in ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
    for tokens in (1, 64, 512, 8192)
]
TINY = (64, 96, 3)


def main() -> None:
    for in_features, out_features, tokens in cases_for(CASES, TINY):
        num_bytes = 2 * (in_features * out_features + tokens * (in_features + out_features))
        pairs = [
            (
                torch.randn(tokens, in_features, dtype=torch.bfloat16, device=DEVICE),
                torch.randn(out_features, in_features, dtype=torch.bfloat16, device=DEVICE),
            )
            for _ in range(copies_for(num_bytes))
        ]
        for name, multiply in (("library", F.linear), ("fixed tile", matmul)):
            seconds = seconds_per_call([lambda x=x, w=w, f=multiply: f(x, w) for x, w in pairs])
            flops = 2 * tokens * in_features * out_features
            report_rate("matmul", f"{tokens} x {in_features} -> {out_features} {name}", flops, seconds)


if __name__ == "__main__":
    main()
