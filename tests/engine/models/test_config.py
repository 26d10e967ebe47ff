"""What config.json may say, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from headrace.engine.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def test_absent_fields_take_transformers_defaults() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not config.tie_word_embeddings
    assert config.max_context == 512
    assert ModelConfig.from_dict(LLAMA | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


def test_every_end_id_of_generation_config_counts() -> None:
    config = ModelConfig.from_dict(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 9], "bos_token_id": 1})
    assert config.eos_ids == (7, 9)
    assert config.bos_id == 1
    assert ModelConfig.from_dict(LLAMA | {"eos_token_id": 2}).eos_ids == (2,)


@pytest.mark.parametrize("eos", [-1, 100, [-1, 10**6]])
def test_an_end_id_beyond_the_vocabulary_ends_nothing(eos: int | list[int]) -> None:
    assert ModelConfig.from_dict(LLAMA, {"eos_token_id": eos}).eos_ids == ()
    both = [2, 2, *(eos if isinstance(eos, list) else [eos])]
    assert ModelConfig.from_dict(LLAMA, {"eos_token_id": both}).eos_ids == (2,)


def test_sampling_defaults_come_from_generation_config() -> None:
    config = ModelConfig.from_dict(LLAMA, {"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None})
    assert config.sampling == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    "default",
    [
        {"temperature": -1},
        {"temperature": "0.7"},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
    ids=str,
)
def test_a_sampling_default_that_no_request_could_ask_for_is_named(default: dict[str, Any]) -> None:
    (name,) = default
    with pytest.raises(BadCheckpoint, match=rf"generation_config\.json's {name} must be"):
        ModelConfig.from_dict(LLAMA, default)


MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        (LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"model_type": "mamba"}, "mamba"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA | {"hidden_act": "gelu"}, "'gelu'"),
        (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (LLAMA | {"head_dim": 15}, "head_dim 15"),
        (QWEN2 | {"is_causal": False}, "is_causal"),
        (LLAMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "differ between layers",
        ),
        (
            MISTRAL | {"sliding_window": None, "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        (MISTRAL | {"sliding_window": 128}, "sliding_window 128"),
        (  # yarn goes on to four times max_position_embeddings
            MISTRAL | {"sliding_window": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "sliding_window 512 is shorter than the context of 2048",
        ),
        (MISTRAL | {"max_position_embeddings": 32_768}, "sliding_window 4096"),  # Transformers' default
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window 64",
        ),
        (
            QWEN2 | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
            "sliding_window",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL | {"sliding_window": None, "max_position_embeddings": 32_768},
        MISTRAL | {"sliding_window": 512},
        MISTRAL | {"sliding_window": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 64},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        QWEN2 | {"layer_types": ["full_attention"] * 2, "sliding_window": 64},
    ],
)
def test_a_window_that_no_token_feels_is_accepted(config: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(config).max_context >= 512


def test_a_context_no_longer_than_the_window_makes_it_one_that_no_token_feels() -> None:
    windowed = MISTRAL | {"sliding_window": 128}
    assert ModelConfig.from_dict(windowed, max_context=128).max_context == 128
    with pytest.raises(UnsupportedModel, match=r"sliding_window 128 .*HEADRACE_MAX_CONTEXT\) of 128"):
        ModelConfig.from_dict(windowed, max_context=129)


def test_missing_sizes_are_named() -> None:
    with pytest.raises(BadCheckpoint, match="hidden_size, num_attention_heads"):
        ModelConfig.from_dict(
            {k: v for k, v in LLAMA.items() if k not in ("hidden_size", "num_attention_heads")}
        )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"max_position_embeddings": 512.0}, "max_position_embeddings"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, [3]]}, "eos_token_id"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "4k"}},
            "original_max_position_embeddings",
        ),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_used_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"{named} must be"):
        ModelConfig.from_dict(LLAMA | changed)


def test_an_architecture_may_stand_without_a_list() -> None:
    assert ModelConfig.from_dict(LLAMA | {"architectures": "LlamaForCausalLM"}).num_heads == 4


def test_heads_must_share_key_value_heads_evenly() -> None:
    with pytest.raises(BadCheckpoint, match="4 heads"):
        ModelConfig.from_dict(LLAMA | {"num_key_value_heads": 3})


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"llama"'])
def test_a_damaged_config_is_a_bad_checkpoint(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)
