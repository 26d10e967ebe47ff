"""Which way swiglu goes, and what it gives."""

import pytest
import torch

from headrace.kernels.silu_mul import silu_mul
from headrace.kernels.swiglu import pays, swiglu
from headrace.kernels.swiglu_hopper import share_used, whole_tiles


def test_swiglu_gates_the_product_s_second_half_by_its_first() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12)
    assert torch.equal(swiglu(x, weight), silu_mul(x @ weight.T))
    assert swiglu(x[:0], weight).shape == (0, 6)
    torch.testing.assert_close(swiglu(x, weight, bias), silu_mul(x @ weight.T + bias))


def test_weights_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight \[2I, H\]"):
        swiglu(torch.ones(2, 8), torch.ones(4, 6))


@pytest.mark.parametrize(
    ("tiles", "whole"),
    [(1, 0), (66, 0), (67, 67), (132, 132), (133, 132), (198, 132), (199, 199), (264, 264)],
)
def test_a_last_round_is_cut_in_two_where_half_the_programs_or_fewer_have_a_tile(
    tiles: int, whole: int
) -> None:
    assert whole_tiles(tiles, 132) == whole


def test_the_share_of_programs_at_work_counts_a_cut_round_as_little_more_than_half() -> None:
    assert share_used(128, 132 * 128, 132) == 1
    assert share_used(1, 132 * 128, 132) == 1  # a tile's spare rows are computed as well
    assert share_used(128, 100 * 128, 132) == pytest.approx(100 / 132)
    assert share_used(128, 33 * 128, 132) == pytest.approx(33 / 132 / 0.54)
    assert share_used(256, 99 * 128, 132) == pytest.approx(198 / 132 / 1.54)


def test_one_kernel_pays_where_the_multiprocessors_stay_busy_or_the_activation_is_a_large_part() -> None:
    large, small = (4096, 14336, 132), (1024, 3072, 132)
    sizes = (0, 1, 64, 256, 512, 576, 704, 1152, 1280, 2048, 8192)
    assert [tokens for tokens in sizes if pays(tokens, *large)] == [1280, 2048, 8192]
    assert [tokens for tokens in sizes if pays(tokens, *small)] == [576, 1280, 2048, 8192]
