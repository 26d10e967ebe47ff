"""Masks of grammars: bits read and tokens kept out written, against the copy bandwidth.  python bench/kernels/mask_logits.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.mask_logits import mask_logits

# rows, vocabulary
CASES = [(1024, 151_936), (256, 151_936), (16, 151_936)]
TINY = (2, 100)
# 32 bits of a mask, and the share of sectors (32 bytes, 8 tokens) that are written: nearly nothing is allowed, as between a
# schema's keys, or nearly everything, as inside strings.
KINDS = {"one token in 32 allowed": (1, 1.0), "all but one in 32 allowed": (-2, 0.25)}


def main() -> None:
    for rows, vocab in cases_for(CASES, TINY):
        words = -(-vocab // 32)
        lines = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        all_logits = [torch.randn(rows, vocab, device=DEVICE) for _ in range(copies_for(rows * vocab * 4))]
        for kind, (word, written) in KINDS.items():
            masks = torch.full((rows, words), word, dtype=torch.int32, device=DEVICE)
            num_bytes = rows * (words * 4 + vocab * 4 * written)
            calls = [lambda x=logits, m=masks, a=lines: mask_logits(x, m, a) for logits in all_logits]
            report_bandwidth("mask_logits", f"{rows} x {vocab} {kind}", num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
