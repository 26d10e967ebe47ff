# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Log-probabilities of some rows' tokens: the chosen one's, and the likeliest ones'.

    logprob_v = logits_v - log sum_u exp(logits_u)        of the model's own logits, in fp32

The likeliest are found one by one, each the largest below the one before it. Equals may come in any order. A row with a
logit that is NaN or plus infinity has NaN for its chosen token, whichever that is, -1 (none could be chosen) included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, use_triton


@triton.jit(do_not_specialize=["width"])
def _logprobs_kernel(
    logits_ptr,  # [K, V], rows row_stride apart
    rows_ptr,  # [L] int32
    tokens_ptr,  # [K] int64
    counts_ptr,  # [L] int32
    logprobs_ptr,  # [L, 1 + W] fp32
    ids_ptr,  # [L, W] int32
    vocab,
    row_stride,
    width,
    BLOCK: tl.constexpr,
):
    """One program per row: once over it for the sum, once more for each of the likeliest tokens it wants."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + program).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    lanes = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(row_ptr + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    top = tl.max(largest)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(row_ptr + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
        mass += tl.exp(x - top)
    log_sum = top + tl.log(tl.sum(mass))

    out_ptr = logprobs_ptr + program * (1 + width)
    chosen = tl.load(row_ptr + tl.maximum(tl.load(tokens_ptr + row), 0)).to(tl.float32)
    tl.store(out_ptr, chosen - log_sum)

    last = float("inf")
    last_id = -1
    for i in range(tl.load(counts_ptr + program)):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_ids = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + lanes
            x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            below = (ids < vocab) & ((x < last) | ((x == last) & (ids > last_id)))
            better = below & ((x > best) | (best_ids == 2147483647))
            best = tl.where(better, x, best)
            best_ids = tl.where(better, ids, best_ids)
        last = tl.max(best)
        last_id = tl.min(tl.where(best == last, best_ids, 2147483647))
        tl.store(out_ptr + 1 + i, last - log_sum)
        tl.store(ids_ptr + program * width + i, last_id)


def logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of some rows. logits: [K, V]; tokens: [K] int64, the chosen ones.

    rows, counts: [L] int32, lines of ``logits`` and how many of the likeliest tokens each wants, at most ``width``.
    Returns ([L, 1 + width] fp32, the chosen token's first, then falling; [L, width] int32, the likeliest tokens' ids).
    What lies beyond a row's count is undefined.
    """
    check(logits.dim() == 2 and logits.stride(1) == 1, "logits must be [K, V], contiguous along V")
    check(len(rows) == len(counts), "rows and counts must be equally long")
    check(width <= logits.shape[1], "there are no more likeliest tokens than tokens")
    if not use_triton(logits):
        return logprobs_reference(logits, rows, tokens, width)
    values = torch.empty(len(rows), 1 + width, dtype=torch.float32, device=logits.device)
    ids = torch.empty(len(rows), width, dtype=torch.int32, device=logits.device)
    if len(rows):
        _logprobs_kernel[(len(rows),)](
            logits, rows, tokens, counts, values, ids, logits.shape[1], logits.stride(0), width,
            BLOCK=2048, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return values, ids


def logprobs_reference(logits: Tensor, rows: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """logprobs in plain torch."""
    wanted = rows.long()
    values = logits[wanted].float().log_softmax(dim=-1)
    top, ids = values.topk(width, dim=-1)
    chosen = values.gather(1, tokens[wanted, None].clamp(min=0))
    return torch.cat((chosen, top), dim=1), ids.int()
