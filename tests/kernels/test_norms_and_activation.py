import math

import pytest
import torch
from kernel_cases import strided_rows
from torch.nn import functional as F

from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.silu_mul import silu_mul


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 7), torch.randn(7)
    y = rms_norm(strided_rows(x), weight, 1e-3)
    for row, out in zip(x.tolist(), y.tolist(), strict=True):
        root = math.sqrt(sum(value * value for value in row) / 7 + 1e-3)
        expected = [value / root * scale for value, scale in zip(row, weight.tolist(), strict=True)]
        assert out == pytest.approx(expected, rel=1e-5)


def test_rms_norm_rounds_where_transformers_does() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    norm = llama.LlamaRMSNorm(96, eps=1e-5).bfloat16()
    norm.weight.data.normal_()
    x = torch.randn(5, 96).bfloat16()
    assert torch.equal(rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())


def test_add_rms_norm_keeps_the_rounded_sum_as_residual() -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(4, 33).bfloat16(),
        torch.randn(4, 33).bfloat16(),
        torch.ones(33).bfloat16(),
    )
    summed = x + residual
    y = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, summed)
    assert torch.equal(y, rms_norm(summed, weight, 1e-5))


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 10)
    y = silu_mul(strided_rows(gate_up))
    for row, out in zip(gate_up.tolist(), y.tolist(), strict=True):
        expected = [gate / (1 + math.exp(-gate)) * up for gate, up in zip(row[:5], row[5:], strict=True)]
        assert out == pytest.approx(expected, rel=1e-5)


def test_silu_mul_rounds_where_transformers_does() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 64).bfloat16()
    assert torch.equal(silu_mul(gate_up), F.silu(gate_up[:, :32]) * gate_up[:, 32:])


def test_launchers_refuse_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weight \[H\]"):
        rms_norm(torch.ones(2, 8), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.ones(8, 2).T, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(torch.ones(2, 8), torch.ones(2, 8).bfloat16(), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="2I"):
        silu_mul(torch.ones(2, 7))
