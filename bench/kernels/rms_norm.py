"""RMS norm with the residual addition: bytes moved, against the copy bandwidth.  python bench/kernels/rms_norm.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.rms_norm import add_rms_norm, rms_norm

# tokens, hidden
CASES = [(8192, 4096), (1024, 4096), (256, 4096), (8192, 1024), (1024, 1024), (4096, 576)]
TINY = (3, 64)


def main() -> None:
    for tokens, hidden in cases_for(CASES, TINY):
        weight = torch.randn(hidden, dtype=torch.bfloat16, device=DEVICE)
        for fused in (True, False):
            num_bytes = tokens * hidden * 2 * (4 if fused else 2)
            calls = []
            for _ in range(copies_for(num_bytes)):
                x, residual = torch.randn(2, tokens, hidden, dtype=torch.bfloat16, device=DEVICE)
                if fused:
                    calls.append(lambda x=x, residual=residual, w=weight: add_rms_norm(x, residual, w, 1e-5))
                else:
                    calls.append(lambda x=x, w=weight: rms_norm(x, w, 1e-5))
            name = "add_rms_norm" if fused else "rms_norm"
            report_bandwidth(name, f"{tokens} x {hidden}", num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
