# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What a step feeds on, gathered on the device from the slot table.

Row r of a step owns tokens query_start[r] .. query_start[r + 1] - 1. Its i-th token sits at position starts[r] + i:

    id       = token_ids[t], or last_tokens[slots[r]] where token_ids[t] is -1 (sampled by a step not read back yet),
               or 0 where that is -1 too (no token could be chosen, which the host will know once it has read it)
    mapping  = block_tables[slots[r], position // B] * B + position % B

Rows whose slot is -1, and tokens past the last row, are padding: id 0, position 0, mapping -1.

The ids may be kept as keys and values are, pages[mapping] = id, so that a later step can read what a row has said: a
shared block brings its tokens along, a preempted sequence writes them again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, cdiv, check, use_triton


# Batch sizes change from step to step: neither they nor where a slice of a buffer starts may ask for a compilation.
@triton.jit(
    do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=["slots_ptr", "starts_ptr"]
)
def _step_inputs_kernel(
    token_ids_ptr,  # [T] int64
    query_start_ptr,  # [R + 1] int32
    slots_ptr,  # [R] int32
    starts_ptr,  # [R] int32
    last_tokens_ptr,  # [S] int64
    block_tables_ptr,  # [S, M] int32, rows table_stride apart
    ids_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64
    pages_ptr,  # [N, B] int32, or None
    num_tokens,
    num_rows,
    table_stride,
    block_size,
    BLOCK: tl.constexpr,
):
    """One program covers BLOCK tokens; each finds its row by binary search."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens

    # The last row whose first token is not past this one: empty rows before it are passed over.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.full([BLOCK], 0, tl.int32) + num_rows
    for _ in range(16):  # up to 65,535 rows; more rounds than needed change nothing
        middle = (low + high) // 2
        after = tl.load(query_start_ptr + middle, mask=middle < num_rows, other=2147483647) > token
        high = tl.where(after, middle, high)
        low = tl.where(after, low, tl.minimum(middle + 1, high))
    row = tl.maximum(low - 1, 0)

    inside = mask & (token < tl.load(query_start_ptr + row + 1)) & (token >= tl.load(query_start_ptr + row))
    slot = tl.load(slots_ptr + row, mask=inside, other=-1)
    real = inside & (slot >= 0)
    slot = tl.maximum(slot, 0).to(tl.int64)
    position = tl.load(starts_ptr + row, mask=real, other=0) + token - tl.load(query_start_ptr + row)
    position = tl.where(real, position, 0)

    given = tl.load(token_ids_ptr + token, mask=real, other=0)
    last = tl.load(last_tokens_ptr + slot, mask=real & (given < 0), other=0)
    block = tl.load(block_tables_ptr + slot * table_stride + position // block_size, mask=real, other=0).to(
        tl.int64
    )
    mapping = block * block_size + position % block_size

    id = tl.where(given < 0, tl.maximum(last, 0), given)
    tl.store(ids_ptr + token, id, mask=mask)
    tl.store(positions_ptr + token, position.to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + token, tl.where(real, mapping, -1), mask=mask)
    if pages_ptr is not None:
        tl.store(pages_ptr + mapping, id.to(tl.int32), mask=real)


def step_inputs(
    token_ids: Tensor,
    query_start: Tensor,
    slots: Tensor,
    starts: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the ids, positions and cache slots of a step's tokens.

    token_ids: [T] int64. query_start: [R + 1] int32, ascending. slots, starts: [R] int32. last_tokens: [S] int64.
    block_tables: [S, M] int32. pages: [N, B] int32, written where given. Returns (ids, positions, slot_mapping), each [T] int64.
    """
    check(len(query_start) == len(slots) + 1 == len(starts) + 1, "query_start has one entry more than slots")
    if not use_triton(token_ids):
        return step_inputs_reference(
            token_ids, query_start, slots, starts, last_tokens, block_tables, block_size, pages
        )
    ids, positions, mapping = torch.empty((3, len(token_ids)), dtype=torch.int64, device=token_ids.device)
    if len(token_ids):
        grid = (cdiv(len(token_ids), 128),)
        _step_inputs_kernel[grid](
            token_ids, query_start, slots, starts, last_tokens, block_tables, ids, positions, mapping,
            pages, len(token_ids), len(slots), block_tables.stride(0), block_size,
            BLOCK=128, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return ids, positions, mapping


def step_inputs_reference(
    token_ids: Tensor,
    query_start: Tensor,
    slots: Tensor,
    starts: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """step_inputs in plain torch."""
    tokens = torch.arange(len(token_ids), device=token_ids.device)
    row = torch.searchsorted(query_start[1:].contiguous(), tokens.to(query_start.dtype), right=True)
    # Tokens past the last row belong to one more row, a padded one.
    slot = torch.cat((slots, slots.new_tensor([-1])))[row].long()
    start = torch.cat((starts, starts.new_tensor([0])))[row].long()
    real = slot >= 0
    positions = torch.where(real, start + tokens - query_start[row], 0)
    last = last_tokens[slot.clamp(min=0)].clamp(min=0)
    ids = torch.where(real, torch.where(token_ids < 0, last, token_ids), 0)
    block = block_tables[slot.clamp(min=0), positions // block_size].long()
    mapping = torch.where(real, block * block_size + positions % block_size, -1)
    if pages is not None:
        pages.view(-1)[mapping[real]] = ids[real].int()
    return ids, positions, mapping
