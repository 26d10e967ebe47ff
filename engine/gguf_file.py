"""Reads a GGUF file of the Llama, Qwen2 and Qwen3 families in Hugging Face's terms.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from headrace.engine import gguf_tokenizer
from headrace.engine.errors import BadCheckpoint, UnsupportedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


class GGUFModel:
    """One GGUF file: its config, its tokenizer and its weights under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise BadCheckpoint(f"{path} cannot be read as GGUF: {error}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self._value("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"GGUF architecture {self.architecture!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        if self._of_arch("expert_count", 0):
            raise UnsupportedModel(f"GGUF model {path.name} is a mixture of experts")

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        heads = self._of_arch("attention.head_count")
        hidden = self._of_arch("embedding_length")
        head_dim = self._of_arch("attention.key_length", hidden // heads)
        if self._of_arch("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModel("GGUF model rotates only a part of each head")
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": len(self._value("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": self._of_arch("feed_forward_length"),
            "num_hidden_layers": self._of_arch("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._of_arch("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._of_arch("context_length"),
            # Stored as float32: seven digits bring 1e-05 back.
            "rms_norm_eps": float(f"{self._of_arch('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(self._of_arch("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in self._tensors,
            "dtype": "bfloat16",
            **self._special_ids(),
        }

    def generation_config(self) -> dict[str, Any]:
        """Ids that start, pad and end a sequence; an end of turn counts as an end."""
        ids = self._special_ids()
        ends = [
            ids.get("eos_token_id"),
            *(self._value(f"tokenizer.ggml.{k}_token_id", None) for k in ("eot", "eom")),
        ]
        unique = list(dict.fromkeys(end for end in ends if end is not None))
        return ids | {"eos_token_id": unique[0] if len(unique) == 1 else unique}

    def write_tokenizer(self, dst: Path) -> None:
        """tokenizer.json and tokenizer_config.json, the chat template in it."""
        prefix = "tokenizer."
        fields = {
            name.removeprefix(prefix): f.contents()
            for name, f in self._fields.items()
            if name.startswith(prefix)
        }
        gguf_tokenizer.write(fields, dst, max_length=self._of_arch("context_length"))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, dequantised to bfloat16."""
        heads = self._of_arch("attention.head_count")
        kv_heads = self._of_arch("attention.head_count_kv", heads)
        for name, tensor in self._tensors.items():
            if name == _ROPE_FREQS:
                continue
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            weight = torch.from_numpy(array)
            if self.architecture == "llama" and ".attn_q." in name:
                weight = _unpermute(weight, heads)
            elif self.architecture == "llama" and ".attn_k." in name:
                weight = _unpermute(weight, kv_heads)
            yield _hf_name(name), weight.to(torch.bfloat16)

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self._of_arch("rope.scaling.type", "none")
        factor = self._of_arch("rope.scaling.factor", 1.0)
        if _ROPE_FREQS in self._tensors:
            return self._llama3_scaling(head_dim)
        if kind == "none" or factor in (0.0, 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = self._of_arch("rope.scaling.original_context_length")
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise UnsupportedModel(f"GGUF RoPE scaling {kind!r}")

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """GGUF stores Llama 3's scaling as a divisor for each frequency. Find the rule that made it."""
        stored = torch.from_numpy(np.array(self._tensors[_ROPE_FREQS].data, dtype=np.float32)).flatten()
        factor = float(stored.max())
        rule = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = float(self._of_arch("rope.freq_base", 10_000.0))
        wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
        smooth = ((8192 / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if stored.shape != expected.shape or not torch.allclose(stored.double(), expected, rtol=1e-3):
            raise UnsupportedModel("GGUF RoPE frequencies that follow no known rule")
        return rule

    def _special_ids(self) -> dict[str, int]:
        names = {"bos": "bos", "eos": "eos", "padding": "pad"}
        ids = {
            f"{ours}_token_id": self._value(f"tokenizer.ggml.{theirs}_token_id", None)
            for theirs, ours in names.items()
        }
        return {name: value for name, value in ids.items() if value is not None}

    def _of_arch(self, key: str, *default: Any) -> Any:
        return self._value(f"{self.architecture}.{key}", *default)

    def _value(self, key: str, *default: Any) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default:
            return default[0]
        raise BadCheckpoint(f"GGUF file has no {key}")


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's pairing of rotary dimensions: its Llama rows alternate between the two halves of a head."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    match name.split("."):
        case [top, leaf] if top in _TOP:
            return f"{_TOP[top]}.{leaf}"
        case ["blk", layer, part, leaf] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{leaf}"
    raise UnsupportedModel(f"GGUF tensor {name} belongs to a feature that is not supported")
