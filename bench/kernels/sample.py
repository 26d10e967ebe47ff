"""The sampler: one read of the logits, against the copy bandwidth.  python bench/kernels/sample.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.sample import sample

# rows, vocabulary, of what
CASES = [
    (1024, 151_936, torch.bfloat16),
    (1024, 128_256, torch.bfloat16),
    (256, 151_936, torch.bfloat16),
    (256, 151_936, torch.float32),
    (16, 151_936, torch.bfloat16),
    (1024, 49_152, torch.bfloat16),
]
TINY = (2, 100, torch.float32)


def main() -> None:
    for rows, vocab, dtype in cases_for(CASES, TINY):
        num_bytes = rows * vocab * dtype.itemsize
        count = copies_for(num_bytes)
        # Peaked as a model's are: a few tokens hold most of the mass.
        all_logits = [(torch.randn(rows, vocab, device=DEVICE) * 2.5).to(dtype) for _ in range(count)]
        number = torch.arange(rows, device=DEVICE)
        ones, zeros = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
        some = torch.where(number % 2 == 0, 0.0, 1.0)
        kinds = {
            "greedy": (zeros, zeros.int(), ones, zeros, number, number, True, True),
            "sampled": (ones, zeros.int(), ones, zeros, number, number, False, True),
            "half greedy": (some, zeros.int(), ones, zeros, number, number, False, True),
            "top_k 50": (ones, zeros.int() + 50, ones, zeros, number, number, False, False),
            "top_p 0.9": (ones, zeros.int(), ones * 0.9, zeros, number, number, False, False),
            "min_p 0.05": (ones, zeros.int(), ones, zeros + 0.05, number, number, False, False),
            "top_k 50, top_p 0.9": (ones, zeros.int() + 50, ones * 0.9, zeros, number, number, False, False),
        }
        for kind, (*arguments, all_greedy, no_filters) in kinds.items():
            calls = [
                lambda logits=logits, a=tuple(arguments), g=all_greedy, n=no_filters: sample(
                    logits, *a, all_greedy=g, no_filters=n
                )
                for logits in all_logits
            ]
            shape = f"{rows} x {vocab} {str(dtype)[6:]} {kind}"
            report_bandwidth("sample", shape, num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
