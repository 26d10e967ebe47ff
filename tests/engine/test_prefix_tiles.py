"""Groups of rows that share a prefix, cut into the attention kernel's tiles."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.prefix_tiles import most_tiles, prefix_tiles
from headrace.engine.sharers import LEAST_SHARERS


def plan(rows: int, *groups: tuple[int, int, int]) -> SimpleNamespace:
    start, count, keys = (np.array([group[i] for group in groups], np.int32) for i in range(3))
    return SimpleNamespace(num_decodes=rows, group_start=start, group_rows=count, group_keys=keys)


def listed(result):
    return [array.tolist() for array in result]


def test_a_group_of_more_rows_than_a_tile_holds_is_cut():
    assert listed(prefix_tiles(plan(9, (1, 5, 64), (6, 2, 32)), rows_per_tile=2)) == [
        [0, 64, 64, 64, 64, 64, 32, 32, 0],
        [4],
        [1, 3, 5, 6],
        [2, 2, 1, 2],
        [64, 64, 64, 32],
    ]


def test_no_group_is_no_tile():
    assert listed(prefix_tiles(plan(3), rows_per_tile=4)) == [[0, 0, 0], [0], [], [], []]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(LEAST_SHARERS, 40)), max_size=12),
    st.integers(0, 5),
    st.integers(1, 64),
)
def test_no_step_has_more_tiles_than_there_is_room_for(groups, alone, rows_per_tile):
    at = 0
    placed = []
    for gap, rows in groups:
        placed.append((at + gap, rows, 32))
        at += gap + rows
    lens, (tiles,), start, rows, keys = listed(prefix_tiles(plan(at + alone, *placed), rows_per_tile))
    assert tiles == len(start) == len(rows) == len(keys) <= most_tiles(at + alone, rows_per_tile)
    assert all(0 < count <= rows_per_tile for count in rows)
    covered = [row for first, count in zip(start, rows, strict=True) for row in range(first, first + count)]
    assert covered == [row for row, length in enumerate(lens) if length]
    assert len(covered) == sum(rows for _, rows, _ in placed)


@pytest.mark.parametrize(
    ("rows", "of_a_group", "rows_per_tile"),
    [(2048, 4, 64), (43, 4, 8), (2048, 4, 7), (96, 6, 5), (20, 4, 1)],
)
def test_there_is_no_more_room_than_some_step_takes(rows, of_a_group, rows_per_tile):
    groups = [(first, of_a_group, 256) for first in range(0, rows - of_a_group + 1, of_a_group)]
    _, (tiles,), *_ = prefix_tiles(plan(rows, *groups), rows_per_tile)
    assert tiles == most_tiles(rows, rows_per_tile)


def test_too_few_rows_for_a_group_need_no_room():
    assert most_tiles(LEAST_SHARERS - 1, rows_per_tile=64) == 0
