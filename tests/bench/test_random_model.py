"""The benchmarks' shapes are the published ones, by their numbers of weights, and a config.json of one's own is taken too."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engine.models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))  # behind the harness, which has a pipeline.py too

from floor import floor_seconds, product_seconds  # noqa: E402
from random_model import SHAPES, config_directory, shape_of  # noqa: E402

WEIGHTS = {
    "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "qwen2.5-1.5b": 1_543_714_304, "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "qwen1.5-1.8b": 1_836_828_672, "qwen2.5-3b": 3_085_938_688,
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_shape_has_as_many_weights_as_the_model_and_reads_as_transformers_reads_it(name: str) -> None:
    with config_directory(SHAPES[name]) as folder:
        ours, theirs = ModelConfig.from_directory(folder), AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    assert sum(parameter.numel() for parameter in model.parameters()) == WEIGHTS[name]
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    attention = model.model.layers[0].self_attn
    assert ours.head_dim == attention.head_dim


def test_a_config_is_found_by_its_directory_or_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine/config.json"
    path.write_text(json.dumps(SHAPES["llama3.2-1b"]))
    assert shape_of("tiny") == ("tiny", SHAPES["tiny"])
    assert shape_of(str(path)) == shape_of(str(path.parent)) == ("mine", SHAPES["llama3.2-1b"])
    with pytest.raises(SystemExit, match="neither a directory"):
        shape_of("qwen9")
    path.write_text(json.dumps(SHAPES["llama3.2-1b"] | {"vocab_size": 1000}))
    with pytest.raises(SystemExit, match="vocabulary of 32000, it has 1000"):
        shape_of(str(path))


def test_the_floor_counts_a_product_once() -> None:
    weights = 4096 * 4096
    assert product_seconds(weights, tokens=1, steps=1) == 2 * weights / 4.3e12  # the weights' traffic decides
    assert product_seconds(weights, tokens=10_000, steps=1) == 2 * weights * 10_000 / 790e12
    without_head_dim = {key: value for key, value in SHAPES["llama3-8b"].items() if key != "head_dim"}
    work = [([1] * 64, 8)]
    assert floor_seconds(without_head_dim, work) == floor_seconds(SHAPES["llama3-8b"], work)
