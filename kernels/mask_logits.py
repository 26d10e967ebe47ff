# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Tokens that a grammar does not allow are kept out, in place:

x_v = -inf   where bit v of the row's mask is 0        (bit v is bit v mod 32 of word v div 32)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, cdiv, check, use_triton


@triton.jit
def _mask_logits_kernel(
    logits_ptr,  # [E, V], rows row_stride apart
    masks_ptr,  # [M, W] int32
    lines_ptr,  # [E] int32
    vocab,
    words,
    row_stride,
    BLOCK: tl.constexpr,
):
    """One program covers BLOCK tokens of a row. Only tokens kept out are written."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines_ptr + row).to(tl.int64)
    if line >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        word = tl.load(masks_ptr + line * words + ids // 32, mask=inside, other=0)
        kept_out = ((word >> (ids % 32)) & 1) == 0
        tl.store(logits_ptr + row * row_stride + ids, float("-inf"), mask=inside & kept_out)


def mask_logits(logits: Tensor, masks: Tensor, lines: Tensor) -> None:
    """Lay masks over logits, in place. logits: [E, V] fp32. masks: [M, ceil(V / 32)] int32, packed.

    lines: [E] int32, each row's line of ``masks``, -1 for a row that has none.
    """
    vocab = logits.shape[1]
    check(logits.dim() == 2 and logits.stride(1) == 1, "logits must be [E, V], contiguous along V")
    check(masks.is_contiguous() and masks.shape[1] == -(-vocab // 32), "masks must be [M, ceil(V / 32)]")
    check(len(lines) == len(logits), "every row needs a line, or -1")
    if not use_triton(logits):
        mask_logits_reference(logits, masks, lines)
    elif len(logits):
        block = 4096
        _mask_logits_kernel[(len(logits), cdiv(vocab, block))](
            logits, masks, lines, vocab, masks.shape[1], logits.stride(0), BLOCK=block, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip


def mask_logits_reference(logits: Tensor, masks: Tensor, lines: Tensor) -> None:
    """mask_logits in plain torch."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    for row, line in enumerate(lines.tolist()):
        if line >= 0:
            allowed = ((masks[line, :, None] >> bits) & 1).flatten()[: logits.shape[1]]
            logits[row].masked_fill_(allowed == 0, float("-inf"))
