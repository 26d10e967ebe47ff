"""Each family's logits against Transformers' own class, on tiny random models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from one_step import OneSequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.engine.weights import load_model

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads
    "max_position_embeddings": 256,
}

CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama-default-head-dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": None, "num_key_value_heads": 6}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window-of-the-whole-context": (MistralForCausalLM, MistralConfig, {"sliding_window": 256}),
    "mistral-window-of-all-that-is-computed": (MistralForCausalLM, MistralConfig, {"sliding_window": 150}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3-biases": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True}),
}

ROPE = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 200,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    },
}


def tiny(model_class: type[PreTrainedModel], config_class: Any, options: dict[str, Any]) -> PreTrainedModel:
    """A random model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
    return model.eval()


def assert_same_logits(reference: PreTrainedModel, directory: Path, length: int = 150) -> None:
    ids = torch.randint(0, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    model = load_model(directory, "cpu", torch.float32, max_context=length)
    at_once = OneSequence(model, length).logits(ids.tolist())
    torch.testing.assert_close(at_once, expected, atol=1e-4, rtol=1e-4)
    sequence = OneSequence(model, length)
    chunked = [
        sequence.logits(chunk) for chunk in (ids[:37].tolist(), ids[37:38].tolist(), ids[38:].tolist())
    ]
    torch.testing.assert_close(torch.cat(chunked), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_family_gives_transformers_logits(case: str, tmp_path: Path) -> None:
    reference = tiny(*CASES[case])
    reference.save_pretrained(tmp_path)
    assert_same_logits(reference, tmp_path)


@pytest.mark.parametrize("kind", ROPE)
def test_a_rope_scaling_gives_transformers_logits(kind: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 10_000.0, "rope_type": "default"} | ROPE[kind]
    reference = tiny(LlamaForCausalLM, LlamaConfig, {"rope_parameters": rope})
    reference.save_pretrained(tmp_path)
    assert_same_logits(reference, tmp_path)


def test_sharded_weights_load_as_one(tmp_path: Path) -> None:
    reference = tiny(*CASES["qwen3"])
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(reference, tmp_path)


def test_bfloat16_weights_load_into_a_float32_model(tmp_path: Path) -> None:
    tiny(*CASES["llama"]).bfloat16().save_pretrained(tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(reference, tmp_path)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    tiny(*CASES["qwen2"]).save_pretrained(tmp_path)
    weights = []
    for seed in (1, 1, 2):
        model = load_model(tmp_path, "cpu", torch.float32)
        model.random_init(seed)
        weights.append(model.layers[0].attention.qkv.scheme.tensors())
    assert torch.equal(weights[0]["weight"], weights[1]["weight"])
    assert not torch.equal(weights[0]["weight"], weights[2]["weight"])
    assert weights[0]["weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert not weights[0]["bias"].any()
