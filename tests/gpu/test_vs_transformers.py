"""bf16 logits on a GPU agree with Transformers' as well as Transformers' own attentions agree with each other.

Random checkpoints of every family, made here. The truth is Transformers' forward in fp32 over the same bf16 weights;
``eager`` and ``sdpa`` in bf16 both miss it by rounding, and so may we, no further than they do.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from one_step import OneSequence
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.engine.weights import load_model

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLACK = 1.1
"""Rounding is luck: ours may be this much further off than the worse of Transformers' two, and half as far again at most."""

SHAPE = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "max_position_embeddings": 2048, "pad_token_id": 0, "initializer_range": 0.05,
}  # fmt: skip
# Family, query heads, key heads, head size, and what else the config says: groups of 1 to 8.
FAMILIES = {
    "llama": ("LlamaConfig", 8, 2, 64, {}),
    "llama with scaled rope": ("LlamaConfig", 8, 8, 64, {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 256}}),
    "mistral": ("MistralConfig", 4, 1, 128, {"sliding_window": None}),
    "qwen2": ("Qwen2Config", 14, 2, 64, {"hidden_size": 896}),
    "qwen3": ("Qwen3Config", 16, 2, 128, {"tie_word_embeddings": True}),
}  # fmt: skip


def checkpoint(path: Path, family: str) -> None:
    """A random model of the family in bf16; biases and norms random too, since zeros and ones hide mistakes."""
    name, heads, kv_heads, head_dim, more = FAMILIES[family]
    options = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = getattr(transformers, name)(**(SHAPE | options | more))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)


def transformers_logits(path: Path, ids: list[int], attention: str, dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    with torch.inference_mode():
        return model.to(DEVICE)(torch.tensor([ids], device=DEVICE), use_cache=False).logits[0].float()


def our_logits(path: Path, ids: list[int]) -> Tensor:
    """A prompt in two chunks that end within a block, then ten tokens one at a time, as the engine feeds them."""
    sequence = OneSequence(load_model(path, DEVICE, torch.bfloat16), len(ids), block_size=32)
    cuts = [0, len(ids) // 2 + 3, *range(len(ids) - 10, len(ids) + 1)]
    chunks = [sequence.logits(ids[start:end]) for start, end in pairwise(cuts)]
    return torch.cat(chunks).float()


def distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Root mean square and largest difference."""
    difference = (a - b).abs()
    return float(difference.square().mean().sqrt()), float(difference.max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_fp32_as_transformers_are(family: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, family)
    ids = torch.randint(1, SHAPE["vocab_size"], (700,), generator=torch.Generator().manual_seed(1)).tolist()
    truth = transformers_logits(tmp_path, ids, "eager", torch.float32)
    eager = transformers_logits(tmp_path, ids, "eager", torch.bfloat16)
    sdpa = transformers_logits(tmp_path, ids, "sdpa", torch.bfloat16)
    ours = our_logits(tmp_path, ids)
    off = {
        name: distance(logits, truth) for name, logits in (("ours", ours), ("eager", eager), ("sdpa", sdpa))
    }
    apart, spread = distance(ours, sdpa), distance(eager, sdpa)
    print(f"{family}: off fp32 (rms, largest) {off}; ours and sdpa {apart}, eager and sdpa {spread}")
    for kind, slack in ((0, SLACK), (1, 1.5)):
        assert off["ours"][kind] <= slack * max(off["eager"][kind], off["sdpa"][kind])
        assert apart[kind] <= 1.5 * spread[kind]
    assert off["ours"][0] < 0.08 * float(truth.std()), "the model is too noisy for this test to mean anything"
