"""Log-probabilities of the chosen token and the likeliest: one read of the logits, against the copy bandwidth.

python bench/kernels/logprobs.py
"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.logprobs import logprobs

# rows, vocabulary
CASES = [(1024, 151_936), (256, 151_936), (16, 151_936), (1024, 49_152)]
TINY = (2, 100)


def main() -> None:
    for rows, vocab in cases_for(CASES, TINY):
        num_bytes = rows * vocab * 2
        all_logits = [
            torch.randn(rows, vocab, device=DEVICE).mul_(2.5).bfloat16() for _ in range(copies_for(num_bytes))
        ]
        lines = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        tokens = torch.randint(0, vocab, (rows,), device=DEVICE)
        for width in (0, 1, 5, 20):
            arguments = (lines, tokens, torch.full_like(lines, width), width)
            calls = [lambda x=logits, a=arguments: logprobs(x, *a) for logits in all_logits]
            shape = f"{rows} x {vocab} chosen and top {width}"
            report_bandwidth("logprobs", shape, num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
