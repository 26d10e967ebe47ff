"""Step inputs: bytes moved, against the copy bandwidth (a small kernel: its launch is its time).

python bench/kernels/step_inputs.py
"""

import torch
from timing import report_bandwidth, seconds_per_call

from headrace.kernels.step_inputs import step_inputs

for tokens, rows in ((1024, 1024), (8192, 64), (8192, 1024)):
    starts = torch.linspace(0, tokens, rows + 1).int().cuda()
    slots = torch.randperm(rows).int().cuda()
    arguments = (
        torch.full((tokens,), -1, device="cuda"), starts, slots, torch.zeros_like(slots),
        torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.zeros(rows, 1024, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    calls = [lambda arguments=arguments: step_inputs(*arguments, 32)] * 20
    report_bandwidth(f"step_inputs {tokens} tokens {rows} rows", tokens * 8 * 5, seconds_per_call(calls))
