"""SiLU-mul: bytes moved, against the copy bandwidth.  python bench/kernels/silu_mul.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.silu_mul import silu_mul

# tokens, intermediate
CASES = [(8192, 14336), (1024, 14336), (256, 14336), (8192, 3072), (1024, 3072), (4096, 1536)]
TINY = (3, 64)


def main() -> None:
    for tokens, intermediate in cases_for(CASES, TINY):
        num_bytes = tokens * intermediate * 6
        calls = []
        for _ in range(copies_for(num_bytes)):
            gate_up = torch.randn(tokens, 2 * intermediate, dtype=torch.bfloat16, device=DEVICE)
            calls.append(lambda gate_up=gate_up: silu_mul(gate_up))
        report_bandwidth("silu_mul", f"{tokens} x {intermediate}", num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
