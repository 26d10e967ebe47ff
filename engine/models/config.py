"""What a model is, read from config.json and generation_config.json, and what is not supported, refused by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.engine.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from headrace.engine.models.rope import RopeConfig

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Features that change the numbers: a config that sets one is refused, since ignoring it would answer wrongly.
_UNSUPPORTED = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "use_bidirectional_attention",
    "use_qk_norm",
    "attention_multiplier",
)


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture fixes that its config does not say. Values are Transformers' defaults."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: as config.attention_bias says, and then o_proj has one too
    head_dim: int | None = None
    tied: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder. Sizes are in elements, lengths in tokens.

    max_context: the longest sequence, prompt and answer together. eos_ids: every id that ends a sequence.
    sampling: generation_config's temperature, top_p, top_k, min_p, repetition_penalty, as far as it sets them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """Read a Hugging Face directory. Raises ModelNotFound, BadCheckpoint or UnsupportedModel."""
        path = Path(path)
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no config.json")
        generation = path / "generation_config.json"
        return cls.from_dict(
            _read_json(path / "config.json"), _read_json(generation) if generation.is_file() else None
        )

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read config.json's and generation_config.json's content."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        missing = [name for name in _REQUIRED if not isinstance(config.get(name), int)]
        if missing:
            raise BadCheckpoint(f"config.json lacks {', '.join(missing)}")
        _refuse_unsupported(architecture, config)
        rope = RopeConfig.from_dict(config)
        heads = config["num_attention_heads"]
        generation = generation_config or {}
        attention_bias = bool(config.get("attention_bias", False))
        model = cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
            max_context=rope.max_context,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope,
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
            bos_id=_first(generation.get("bos_token_id"), config.get("bos_token_id")),
            eos_ids=_ids(_first(generation.get("eos_token_id"), config.get("eos_token_id"))),
            sampling={k: generation[k] for k in _SAMPLING if generation.get(k) is not None},
        )
        model._check_sizes()
        return model

    def _check_sizes(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BadCheckpoint(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    asked = ", ".join(names) or config.get("model_type") or "none named"
    raise UnsupportedModel(f"architecture {asked}; supported are {', '.join(FAMILIES)}")


def _refuse_unsupported(architecture: str, config: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if config.get(name):
            raise UnsupportedModel(f"config.json sets {name}, which is not supported")
    if config.get("is_causal") is False:
        raise UnsupportedModel("config.json sets is_causal to false; only causal attention is supported")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"activation {activation!r}; supported is silu")
    if window := _sliding_window(architecture, config):
        raise UnsupportedModel(
            f"sliding_window {window} is shorter than max_position_embeddings; sliding attention is not supported"
        )


def _sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    """The attention window, where a sequence can be long enough to feel it."""
    window = config.get("sliding_window", 4096)  # where the key is absent, Transformers' default holds
    if architecture == "MistralForCausalLM":
        applies = True
    elif config.get("layer_types"):
        applies = any(kind != "full_attention" for kind in config["layer_types"])
    else:
        first = config.get("max_window_layers", 28)
        applies = bool(config.get("use_sliding_window")) and first < config["num_hidden_layers"]
    return window if applies and window and window < config["max_position_embeddings"] else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path.name} is not a JSON object")
    return value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
