"""Cuts a step's groups of rows that share a prefix into the tiles that the attention kernel works on. No torch."""

import numpy as np

from headrace.engine.plan import Ints, StepPlan


def prefix_tiles(
    plan: StepPlan, rows_per_tile: int, capacity: int | None = None
) -> tuple[Ints, Ints, Ints, Ints]:
    """prefix_lens [num_decodes], and start, rows, keys [C] of each tile, as SharedPrefixes wants them.

    With a capacity, C is that: spare tiles are empty, and the groups that would save least are left out.
    """
    tiles_of = -(-plan.group_rows // rows_per_tile)
    kept = np.arange(len(tiles_of))
    if capacity is not None:
        kept = np.argsort(-(plan.group_rows * plan.group_keys), kind="stable")
        kept = kept[np.cumsum(tiles_of[kept]) <= capacity]
    start, rows, keys = plan.group_start[kept], plan.group_rows[kept], plan.group_keys[kept]
    prefix_lens = np.zeros(plan.num_decodes, np.int32)
    for first, count, length in zip(start.tolist(), rows.tolist(), keys.tolist(), strict=True):
        prefix_lens[first : first + count] = length

    tiles_of = tiles_of[kept]
    group = np.repeat(np.arange(len(kept)), tiles_of)
    offset = (np.arange(len(group)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * rows_per_tile
    tiles = np.zeros((3, capacity if capacity is not None else len(group)), np.int32)
    tiles[0, : len(group)] = start[group] + offset
    tiles[1, : len(group)] = np.minimum(rows[group] - offset, rows_per_tile)
    tiles[2, : len(group)] = keys[group]
    return prefix_lens, tiles[0], tiles[1], tiles[2]
