"""The batch-invariant product against the library's, at the four products of qwen3-0.6b's layers.  python bench/kernels/matmul.py"""

import torch
from timing import copies_for, report_rate, seconds_per_call
from torch.nn import functional as F

from headrace.kernels.matmul import matmul

for in_features, out_features in ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)):
    for tokens in (1, 64, 512, 8192):
        num_bytes = 2 * (in_features * out_features + tokens * (in_features + out_features))
        pairs = [
            (
                torch.randn(tokens, in_features, dtype=torch.bfloat16, device="cuda"),
                torch.randn(out_features, in_features, dtype=torch.bfloat16, device="cuda"),
            )
            for _ in range(copies_for(num_bytes))
        ]
        for name, multiply in (("library", F.linear), ("fixed tile", matmul)):
            seconds = seconds_per_call([lambda x=x, w=w, f=multiply: f(x, w) for x, w in pairs])
            report_rate(
                f"{name} {tokens} x {in_features} -> {out_features}",
                2 * tokens * in_features * out_features,
                seconds,
            )
