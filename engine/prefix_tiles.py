"""Cuts a step's groups of rows that share a prefix into the tiles that the attention kernel works on. No torch."""

import numpy as np

from headrace.engine.plan import Ints, StepPlan
from headrace.engine.sharers import LEAST_SHARERS


def most_tiles(rows: int, rows_per_tile: int) -> int:
    """How many tiles a step of so many decode rows has at most, however they are grouped.

    Rows make the most tiles in groups that are as small as may be, each a tile; or where tiles hold few rows, in groups of
    one row more than a tile holds, each two.
    """
    return max(rows // LEAST_SHARERS, 2 * rows // (rows_per_tile + 1))


def prefix_tiles(plan: StepPlan, rows_per_tile: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """prefix_lens [num_decodes], the number of tiles [1], and start, rows, keys of each, as SharedPrefixes wants them."""
    start, rows, keys = plan.group_start, plan.group_rows, plan.group_keys
    rises = np.zeros(plan.num_decodes + 1, np.int32)  # of prefix_lens, from one row to the next
    rises[start] += keys
    rises[start + rows] -= keys

    tiles_of = -(-rows // rows_per_tile)
    group = np.repeat(np.arange(len(rows)), tiles_of)
    offset = (np.arange(len(group)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * rows_per_tile
    return (
        np.cumsum(rises[:-1], dtype=np.int32),
        np.array([len(group)], np.int32),
        (start[group] + offset).astype(np.int32),
        np.minimum(rows[group] - offset, rows_per_tile).astype(np.int32),
        keys[group],
    )
