"""Sums of runs of rows (pooling): bytes moved, against the copy bandwidth.  python bench/kernels/segment_sum.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.segment_sum import segment_sum

# runs, rows a run, hidden
CASES = [(16, 512, 4096), (64, 128, 1024), (1, 8192, 4096)]
TINY = (2, 3, 64)


def main() -> None:
    for runs, length, hidden in cases_for(CASES, TINY):
        num_bytes = runs * hidden * (2 * length + 4)
        starts = torch.arange(0, runs * length, length, dtype=torch.int32, device=DEVICE)
        lengths = torch.full_like(starts, length)
        calls = []
        for _ in range(copies_for(num_bytes)):
            x = torch.randn(runs * length, hidden, dtype=torch.bfloat16, device=DEVICE)
            calls.append(lambda x=x, a=starts, b=lengths: segment_sum(x, a, b))
        report_bandwidth("segment_sum", f"{runs} x {length} x {hidden}", num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
