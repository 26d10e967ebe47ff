# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A step's prompt tokens cut into tiles, once for all layers: what prefill_hopper's programs take one after another."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS


class QueryTiles(NamedTuple):
    """Tiles of a step's query tokens, each of one row, on the device; made by ``tile_queries``.

    table: [C, 4] int32; of each tile its first token, how many tokens its row has from there on, that token's position,
    and the row's slot. A row's tiles stand side by side, and only the first of the table are in use.
    progress: [2] int32; how many tiles there are, and how often a launch's programs have drawn so far: zero before a
    launch and after it, so that launches may share it one after another, not at the same time.
    """

    table: Tensor
    progress: Tensor


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_ptr", "context_lens_ptr"],
)
def _tile_queries_kernel(
    slots_ptr,  # [R] int32
    query_start_ptr,  # [R + 1] int32
    context_lens_ptr,  # [R] int32
    table_ptr,  # [C, 4] int32
    progress_ptr,  # [2] int32
    num_rows,
    TOKENS: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,
):
    """One program cuts one row, and counts the tiles of the rows before it for itself."""
    row = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, row, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        begins = tl.load(query_start_ptr + rows, mask=rows < row, other=0)
        ends = tl.load(query_start_ptr + rows + 1, mask=rows < row, other=0)
        before += tl.cdiv(ends - begins, TOKENS)
    first_tile = tl.sum(before)

    begin = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - begin
    position = tl.load(context_lens_ptr + row) - query_len
    slot = tl.load(slots_ptr + row)
    num_tiles = tl.cdiv(query_len, TOKENS)
    for first in range(0, num_tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        at, mask = table_ptr + (first_tile + tile) * 4, tile < num_tiles
        tl.store(at, begin + tile * TOKENS, mask=mask)
        tl.store(at + 1, query_len - tile * TOKENS, mask=mask)
        tl.store(at + 2, position + tile * TOKENS, mask=mask)
        tl.store(at + 3, slot, mask=mask)
    if row == num_rows - 1:
        tl.store(progress_ptr, first_tile + num_tiles)
        tl.store(progress_ptr + 1, 0)


def tile_queries(
    slots: Tensor, query_start: Tensor, context_lens: Tensor, num_tokens: int, tile_tokens: int
) -> QueryTiles:
    """Cut the tokens of a step's rows into tiles of at most ``tile_tokens``.

    slots, context_lens: [R] int32. query_start: [R + 1] int32. num_tokens bounds query_start.
    """
    rows, device = slots.shape[0], slots.device
    table = torch.empty((num_tokens // tile_tokens + rows, 4), dtype=torch.int32, device=device)
    progress = torch.empty(2, dtype=torch.int32, device=device)
    _tile_queries_kernel[(rows,)](
        slots, query_start, context_lens, table, progress, rows,
        TOKENS=tile_tokens, BLOCK=256, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return QueryTiles(table, progress)
