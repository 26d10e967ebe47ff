# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What a row's options change about its logits x, before temperature and filters. In this order, in fp32:

    listed tokens:   x_v += bias_v;  x_v = -inf before position until_v;  only_listed: x_v = -inf for all others
    penalties:       x_v = x_v / repetition, or x_v * repetition where x_v is not positive   for v in prompt or answer
                     x_v -= frequency * (times v stands in the answer) + presence             for v in the answer
    words:           x_v = -inf where the row's last tokens and v would complete one of its words

Repetition is Transformers' (https://arxiv.org/abs/1909.05858), frequency and presence are OpenAI's. What a row has said
is read from the token pages (step_inputs), through its block table. Counting needs a line of V zeros for each program; who
reads a count puts back the zero, so the work follows the length of the row, not the vocabulary.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, multiprocessors, use_triton

_IN_PROMPT = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class EditTable:
    """The edits of S slots. A slot's first ``num_listed`` and ``num_words`` entries count.

    prompt_lens, only_listed, num_listed, num_words: [S] int32. penalties: [S, 3] fp32 (repetition, frequency,
    presence; 1, 0, 0 change nothing). listed, until: [S, E] int32, the ids of a slot distinct. bias: [S, E] fp32.
    words: [S, W, L] int32 token ids, each word at the end of its line, with -1 before it.
    """

    prompt_lens: Tensor
    only_listed: Tensor
    num_listed: Tensor
    num_words: Tensor
    penalties: Tensor
    listed: Tensor
    until: Tensor
    bias: Tensor
    words: Tensor


@triton.jit
def _said(pages_ptr, table_ptr, at, mask, BLOCK_SIZE: tl.constexpr):
    """The tokens at these positions of a row; -2 outside the mask."""
    block = tl.load(table_ptr + at // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return tl.load(pages_ptr + block * BLOCK_SIZE + at % BLOCK_SIZE, mask=mask, other=-2)


@triton.jit(do_not_specialize=["num_rows"])
def _edit_logits_kernel(
    logits_ptr,  # [K, V], rows row_stride apart
    rows_ptr,  # [E] int32: row of the logits
    slots_ptr,  # [E] int32
    lengths_ptr,  # [E] int32: tokens so far, so the position of the new one
    pages_ptr,  # [N, B] int32
    block_tables_ptr,  # [S, M] int32
    prompt_lens_ptr,  # EditTable's
    only_listed_ptr,
    num_listed_ptr,
    num_words_ptr,
    penalties_ptr,
    listed_ptr,
    until_ptr,
    bias_ptr,
    words_ptr,
    counts_ptr,  # [programs, V] int32, zero before and after
    out_ptr,  # [E, V] fp32
    num_rows,
    vocab,
    row_stride,
    table_stride,
    max_listed,
    max_words,
    BLOCK_SIZE: tl.constexpr,
    WORD_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,  # much more than BLOCK: a program alone on its multiprocessor must keep many loads under way
    WORDS: tl.constexpr,
):
    """One program edits every G-th row, one after the other. The barriers order its own threads' reads and writes."""
    program = tl.program_id(0).to(tl.int64)
    counts_ptr += program * vocab
    lanes = tl.arange(0, BLOCK)
    for row in range(program, num_rows, tl.num_programs(0)):
        slot = tl.load(slots_ptr + row).to(tl.int64)
        length = tl.load(lengths_ptr + row)
        row_ptr = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * row_stride
        edited_ptr = out_ptr + row * vocab
        table_ptr = block_tables_ptr + slot * table_stride

        only_listed = tl.load(only_listed_ptr + slot) != 0
        for start in range(0, vocab, COPY):
            ids = start + tl.arange(0, COPY)
            mask = ids < vocab
            x = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
            tl.store(edited_ptr + ids, tl.where(only_listed, float("-inf"), x), mask=mask)
        tl.debug_barrier()

        num_listed = tl.load(num_listed_ptr + slot)
        for start in range(0, num_listed, BLOCK):
            mask = start + lanes < num_listed
            entry = slot * max_listed + start + lanes
            ids = tl.load(listed_ptr + entry, mask=mask, other=0)
            bias = tl.load(bias_ptr + entry, mask=mask, other=0.0)
            until = tl.load(until_ptr + entry, mask=mask, other=0)
            x = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
            tl.store(edited_ptr + ids, tl.where(length < until, float("-inf"), x + bias), mask=mask)
        tl.debug_barrier()

        repetition = tl.load(penalties_ptr + slot * 3)
        frequency = tl.load(penalties_ptr + slot * 3 + 1)
        presence = tl.load(penalties_ptr + slot * 3 + 2)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            prompt_len = tl.load(prompt_lens_ptr + slot)
            for start in range(0, length, BLOCK):
                at = start + lanes
                mask = at < length
                token = _said(pages_ptr, table_ptr, at, mask, BLOCK_SIZE)
                tl.atomic_or(counts_ptr + token, _IN_PROMPT, mask=mask & (at < prompt_len))
                tl.atomic_add(counts_ptr + token, 1, mask=mask & (at >= prompt_len))
            tl.debug_barrier()
            for start in range(0, length, BLOCK):
                at = start + lanes
                mask = at < length
                token = _said(pages_ptr, table_ptr, at, mask, BLOCK_SIZE)
                count = tl.atomic_xchg(counts_ptr + token, 0, mask=mask)
                mask = mask & (count != 0)  # of equal tokens, the first to come takes the count
                x = tl.load(edited_ptr + token, mask=mask, other=0.0)
                x = tl.where(x > 0, x / repetition, x * repetition)
                times = (count & (_IN_PROMPT - 1)).to(tl.float32)
                x = x - times * frequency - tl.where(times > 0, presence, 0.0)
                tl.store(edited_ptr + token, x, mask=mask)
            tl.debug_barrier()

        num_words = tl.load(num_words_ptr + slot)
        for start in range(0, num_words, WORDS):
            word = start + tl.arange(0, WORDS)
            mask = word < num_words
            word_ptr = words_ptr + (slot * max_words + word) * WORD_LEN
            last = tl.load(word_ptr + WORD_LEN - 1, mask=mask, other=0)
            for i in range(WORD_LEN - 1):
                wanted = tl.load(word_ptr + i, mask=mask, other=-1)
                at = length - (WORD_LEN - 1) + i
                mask = mask & (
                    (wanted < 0) | (wanted == _said(pages_ptr, table_ptr, at, at >= 0, BLOCK_SIZE))
                )
            tl.store(edited_ptr + last, float("-inf"), mask=mask)
        tl.debug_barrier()


def programs(device: torch.device) -> int:
    """Lines of counts that a launch uses at most."""
    return multiprocessors(device)


def edit_logits(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    table: EditTable,
    counts: Tensor,
) -> Tensor:
    """Edited logits of some rows. logits: [K, V]. Returns [E, V] fp32.

    rows, slots, lengths: [E] int32, each row's line in ``logits``, its slot, and how many tokens it has. pages: [N, B]
    int32. block_tables: [S, M] int32. counts: [G, V] int32 zeros, which are left as they were; not used on the CPU.
    """
    check(logits.dim() == 2 and logits.stride(1) == 1, "logits must be [K, V], contiguous along V")
    check(len(rows) == len(slots) == len(lengths), "rows, slots and lengths must be equally long")
    if not use_triton(logits):
        return edit_logits_reference(logits, rows, slots, lengths, pages, block_tables, table)
    vocab = logits.shape[1]
    out = torch.empty(len(rows), vocab, dtype=torch.float32, device=logits.device)
    if len(rows):
        _edit_logits_kernel[(min(len(rows), len(counts)),)](
            logits, rows, slots, lengths, pages, block_tables, table.prompt_lens, table.only_listed,
            table.num_listed, table.num_words, table.penalties, table.listed, table.until, table.bias, table.words,
            counts, out, len(rows), vocab, logits.stride(0), block_tables.stride(0), table.listed.shape[1],
            table.words.shape[1], BLOCK_SIZE=pages.shape[1], WORD_LEN=table.words.shape[2], BLOCK=1024, COPY=8192, WORDS=128,
            num_warps=8, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out


def edit_logits_reference(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    table: EditTable,
) -> Tensor:
    """edit_logits in plain torch."""
    out = logits[rows.long()].float()
    for x, slot, length in zip(out, slots.tolist(), lengths.tolist(), strict=True):
        _edit_listed(x, table, slot, length)
        blocks = block_tables[slot, : -(-length // pages.shape[1])].long()
        said = pages[blocks].flatten()[:length].long()
        _penalise(x, said, int(table.prompt_lens[slot]), *table.penalties[slot].tolist())
        _forbid_words(x, said, table.words[slot, : table.num_words[slot]])
    return out


def _edit_listed(x: Tensor, table: EditTable, slot: int, length: int) -> None:
    count = int(table.num_listed[slot])
    ids = table.listed[slot, :count].long()
    listed = x[ids] + table.bias[slot, :count]
    if table.only_listed[slot]:
        x.fill_(float("-inf"))
    x[ids] = listed.masked_fill(table.until[slot, :count] > length, float("-inf"))


def _penalise(
    x: Tensor, said: Tensor, prompt_len: int, repetition: float, frequency: float, presence: float
) -> None:
    if repetition != 1:
        ids = said.unique()
        x[ids] = torch.where(x[ids] > 0, x[ids] / repetition, x[ids] * repetition)
    if frequency or presence:
        ids, times = said[prompt_len:].unique(return_counts=True)
        x[ids] -= times * frequency + presence


def _forbid_words(x: Tensor, said: Tensor, words: Tensor) -> None:
    if not len(words):
        return
    before = words.shape[1] - 1
    tail = torch.cat((said.new_full((before,), -2), said))[len(said) :]
    complete = ((words[:, :-1] < 0) | (words[:, :-1] == tail)).all(dim=1)
    x[words[complete, -1].long()] = float("-inf")
