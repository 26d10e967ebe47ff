"""Step inputs: bytes moved, against the copy bandwidth (a small kernel: its launch is its time).

python bench/kernels/step_inputs.py
"""

import torch
from timing import DEVICE, cases_for, report_bandwidth, seconds_per_call

from headrace.kernels.step_inputs import step_inputs

# tokens, rows
CASES = [(1024, 1024), (8192, 64), (8192, 1024)]
TINY = (16, 4)


def main() -> None:
    for tokens, rows in cases_for(CASES, TINY):
        starts = torch.linspace(0, tokens, rows + 1).int().to(DEVICE)
        slots = torch.randperm(rows).int().to(DEVICE)
        arguments = (
            torch.full((tokens,), -1, device=DEVICE), starts, slots, torch.zeros_like(slots),
            torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.zeros(rows, 1024, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        calls = [lambda arguments=arguments: step_inputs(*arguments, 32)] * 20
        report_bandwidth(
            "step_inputs", f"{tokens} tokens {rows} rows", tokens * 8 * 5, seconds_per_call(calls)
        )


if __name__ == "__main__":
    main()
