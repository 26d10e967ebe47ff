"""Tables of the scaling rules against Transformers', at sizes that real checkpoints have."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.engine.errors import BadCheckpoint, UnsupportedModel
from headrace.engine.models.rope import RopeConfig, cos_sin_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def reference(config: dict[str, Any], length: int) -> torch.Tensor:
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**config))(torch.zeros(1), torch.arange(length)[None])
    half = config["head_dim"] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize(
    ("head_dim", "longest", "theta", "scaling"),
    [
        (64, 8192, 100_000.0, None),
        (64, 131_072, 500_000.0, LLAMA3),  # Llama 3.2
        (
            128,
            32_768,
            1_000_000.0,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        ),
        (128, 16_384, 10_000.0, {"type": "linear", "factor": 4.0}),
        (128, 4096, 10_000.0, {"type": "dynamic", "factor": 2.0}),
    ],
)
def test_tables_equal_transformers_to_the_last_position(
    head_dim: int, longest: int, theta: float, scaling: dict[str, Any] | None
) -> None:
    config = {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    table = cos_sin_table(RopeConfig.from_dict(config), head_dim)
    assert len(table) >= longest
    torch.testing.assert_close(table[:longest], reference(config, longest), atol=5e-3, rtol=0)
    torch.testing.assert_close(table[:2000], reference(config, 2000), atol=2e-4, rtol=0)


def test_yarn_stretches_the_context_by_its_factor() -> None:
    rope = RopeConfig.from_dict(
        {"max_position_embeddings": 32_768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    )
    assert rope.max_context == 131_072


def test_longrope_is_served_up_to_where_it_would_switch() -> None:
    rope = RopeConfig.from_dict(
        {
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        }
    )
    assert rope.max_context == 4096
    assert cos_sin_table(rope, 8).shape == (4096, 8)


def test_old_and_new_spellings_mean_the_same() -> None:
    old = {"max_position_embeddings": 64, "rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    tables = [cos_sin_table(RopeConfig.from_dict(config), 16) for config in (old, new)]
    assert torch.equal(*tables)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'spiral'"):
        RopeConfig.from_dict({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "spiral"}})


def test_partial_rotation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        RopeConfig.from_dict({"max_position_embeddings": 64, "partial_rotary_factor": 0.5})


def test_a_scaling_without_its_numbers_is_a_bad_checkpoint() -> None:
    rope = RopeConfig.from_dict({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear"}})
    with pytest.raises(BadCheckpoint, match="'factor'"):
        cos_sin_table(rope, 16)
