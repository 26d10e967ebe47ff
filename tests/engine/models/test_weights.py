"""Checkpoints that are wrong are refused, and the message names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.engine.errors import BadCheckpoint, UnsupportedModel
from headrace.engine.weights import load_model

Weights = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, change: Callable[[Weights], Weights]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def load(directory: Path) -> None:
    load_model(directory, "cpu", torch.float32)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    missing = "model.layers.1.self_attn.k_proj.weight"
    rewrite(checkpoint, lambda weights: {k: v for k, v in weights.items() if k != missing})
    with pytest.raises(BadCheckpoint, match=f"lacks {missing}"):
        load(checkpoint)


def test_a_surplus_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda weights: weights | {"model.layers.0.mlp.router.weight": torch.zeros(2)})
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.0\.mlp\.router\.weight"):
        load(checkpoint)


def test_a_misshapen_tensor_is_named_with_both_shapes(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda weights: weights | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(
        BadCheckpoint, match=r"model\.norm\.weight has shape \[31\]; the config asks for \[32\]"
    ):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8, torch.bool])
def test_quantised_weights_are_no_numbers_to_compute_with(dtype: torch.dtype, checkpoint: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(checkpoint, lambda weights: weights | {name: weights[name].to(dtype)})
    with pytest.raises(UnsupportedModel, match=rf"{name} is stored as {str(dtype)[6:]}"):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_precision_are_converted(dtype: torch.dtype, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda weights: {name: weight.to(dtype) for name, weight in weights.items()})
    stored = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(checkpoint, "cpu", torch.float32)
    assert torch.equal(model.embedding.weight, stored.float())


def test_old_frequency_tables_are_passed_over(checkpoint: Path) -> None:
    rewrite(
        checkpoint, lambda weights: weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    load(checkpoint)


def test_a_copy_of_a_tied_head_is_passed_over(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_model(checkpoint, "cpu", torch.float32)
    assert model.head is model.embedding


def test_a_checkpoint_without_head_loads_where_the_head_is_tied(checkpoint: Path) -> None:
    rewrite(
        checkpoint,
        lambda weights: {name.removeprefix("model."): weight for name, weight in weights.items()},
    )
    untied = json.loads((checkpoint / "config.json").read_text())
    load(checkpoint)  # with its lm_head.weight
    rewrite(checkpoint, lambda weights: {name: w for name, w in weights.items() if name != "lm_head.weight"})
    with pytest.raises(BadCheckpoint, match=r"lacks lm_head\.weight$"):
        load(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(untied | {"tie_word_embeddings": True}))
    load(checkpoint)


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged"):
        load(checkpoint)


def test_bytes_that_are_no_safetensors_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not a header" * 100)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged"):
        load(checkpoint)


def test_a_shard_that_the_index_names_must_be_there(checkpoint: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="model-00001-of-00002"):
        load(checkpoint)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"index\.json cannot be read"):
        load(checkpoint)


def test_pickled_weights_are_not_read_but_pointed_at_convert(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match="headrace convert"):
        load(checkpoint)


def test_a_directory_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"no model\.safetensors"):
        load(checkpoint)
