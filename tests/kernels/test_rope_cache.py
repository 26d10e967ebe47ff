import cmath

import pytest
import torch

from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope_cache import rope_and_cache

HQ, HKV, D, B = 4, 2, 6, 16


def table(angles: torch.Tensor) -> torch.Tensor:
    """cos_sin for angles [P, D / 2]."""
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def test_heads_are_rotated_as_complex_numbers_and_stored_where_the_mapping_says() -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(3, (HQ + 2 * HKV) * D), torch.rand(9, D // 2) * 6
    k_cache, v_cache = torch.zeros(2, 5, HKV, B, D)
    positions, mapping = torch.tensor([4, 0, 8]), torch.tensor([3 * B + 5, -1, 15])
    q = rope_and_cache(qkv, positions, table(angles), k_cache, v_cache, mapping, HQ, HKV)

    def rotated(head: torch.Tensor, position: int) -> list[float]:
        turned = [
            complex(head[i], head[i + D // 2]) * cmath.exp(1j * float(angles[position, i]))
            for i in range(D // 2)
        ]
        return [z.real for z in turned] + [z.imag for z in turned]

    heads = qkv.view(3, HQ + 2 * HKV, D)
    for token, position in enumerate(positions.tolist()):
        for head in range(HQ):
            assert q[token, head].tolist() == pytest.approx(rotated(heads[token, head], position), abs=1e-5)
    for token, block, offset in ((0, 3, 5), (2, 0, 15)):
        for head in range(HKV):
            expected = rotated(heads[token, HQ + head], int(positions[token]))
            assert k_cache[block, head, offset].tolist() == pytest.approx(expected, abs=1e-5)
            assert torch.equal(v_cache[block, head, offset], heads[token, HQ + HKV + head])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == 2 * HKV * D


def test_the_norms_apply_to_each_head_before_the_rotation() -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(2, (HQ + 2 * HKV) * D), torch.rand(3, D // 2)
    q_norm, k_norm = torch.randn(2, D)
    positions, mapping = torch.tensor([1, 2]), torch.tensor([0, 1])
    caches = torch.zeros(2, 1, HKV, B, D)
    q = rope_and_cache(
        qkv, positions, table(angles), *caches, mapping, HQ, HKV, q_norm=q_norm, k_norm=k_norm, eps=1e-3
    )

    normed = qkv.clone()
    normed[:, : HQ * D] = rms_norm(qkv[:, : HQ * D].reshape(-1, D), q_norm, 1e-3).view(2, -1)
    normed[:, HQ * D : -HKV * D] = rms_norm(qkv[:, HQ * D : -HKV * D].reshape(-1, D), k_norm, 1e-3).view(
        2, -1
    )
    expected = torch.zeros_like(caches)
    assert torch.allclose(
        q, rope_and_cache(normed, positions, table(angles), *expected, mapping, HQ, HKV), atol=1e-6
    )
    assert torch.allclose(caches, expected, atol=1e-6)


def test_values_that_are_no_finite_numbers_are_stored_as_zeros_and_their_keys_as_nan() -> None:
    qkv = torch.arange(1.0, 1 + (HQ + 2 * HKV) * D).repeat(2, 1)
    k, v = slice(HQ * D, (HQ + HKV) * D), slice((HQ + HKV) * D, None)
    clean = qkv[0, v].clone()
    qkv[0, v][::5] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    k_cache, v_cache = torch.zeros(2, 1, HKV, B, D)
    rope_and_cache(
        qkv, torch.zeros(2).long(), table(torch.zeros(1, D // 2)), k_cache, v_cache, torch.arange(2), HQ, HKV
    )
    clean[::5] = 0
    assert torch.equal(v_cache[0, :, 0].flatten(), clean)
    assert torch.equal(k_cache[0, :, 0].isnan().flatten(), clean == 0)
    assert k_cache[0, :, 1].flatten().tolist() == qkv[1, k].tolist()
    assert v_cache[0, :, 1].flatten().tolist() == qkv[1, v].tolist()


def test_half_a_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="come together"):
        rope_and_cache(
            torch.zeros(1, (HQ + 2 * HKV) * D), torch.zeros(1, dtype=torch.int64), torch.zeros(1, D),
            *torch.zeros(2, 1, HKV, B, D), torch.zeros(1, dtype=torch.int64), HQ, HKV, q_norm=torch.ones(D),
        )  # fmt: skip
