"""Groups of rows that share a prefix, cut into the attention kernel's tiles."""

from types import SimpleNamespace

import numpy as np

from headrace.engine.prefix_tiles import prefix_tiles


def plan(rows: int, *groups: tuple[int, int, int]) -> SimpleNamespace:
    start, count, keys = (np.array([group[i] for group in groups], np.int32) for i in range(3))
    return SimpleNamespace(num_decodes=rows, group_start=start, group_rows=count, group_keys=keys)


def listed(result):
    return [array.tolist() for array in result]


def test_a_group_of_more_rows_than_a_tile_holds_is_cut():
    assert listed(prefix_tiles(plan(9, (1, 5, 64), (6, 2, 32)), rows_per_tile=2)) == [
        [0, 64, 64, 64, 64, 64, 32, 32, 0],
        [1, 3, 5, 6],
        [2, 2, 1, 2],
        [64, 64, 64, 32],
    ]


def test_spare_tiles_are_empty_and_the_groups_that_save_least_are_left_out():
    lens, start, rows, keys = listed(
        prefix_tiles(plan(8, (0, 2, 32), (2, 4, 640)), rows_per_tile=2, capacity=2)
    )
    assert lens == [0, 0, 640, 640, 640, 640, 0, 0]
    assert (start, rows, keys) == ([2, 4], [2, 2], [640, 640])
    lens, start, rows, keys = listed(prefix_tiles(plan(2, (0, 2, 32)), rows_per_tile=4, capacity=3))
    assert (start, rows, keys) == ([0, 0, 0], [2, 0, 0], [32, 0, 0])


def test_no_group_is_no_tile():
    assert listed(prefix_tiles(plan(3), rows_per_tile=4)) == [[0, 0, 0], [], [], []]
