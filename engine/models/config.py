"""What a model is, read from config.json and generation_config.json, and what is not supported, refused by name."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.engine.errors import BadCheckpoint, EngineError, ModelNotFound, UnsupportedModel
from headrace.engine.models.rope import RopeConfig

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_DEFAULTED = ("num_key_value_heads", "head_dim")  # sizes that a config may leave out, or set to null
# What generation_config.json may set, what is allowed in words, and whether a number is that.
_SAMPLING: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("temperature", "0 or more", lambda v: 0 <= v < math.inf),
    ("top_p", "above 0 and up to 1", lambda v: 0 < v <= 1),
    ("top_k", "a whole number, 0 (all) or more", lambda v: v >= 0 and v == int(v)),
    ("min_p", "from 0 to 1", lambda v: 0 <= v <= 1),
    ("repetition_penalty", "above 0", lambda v: 0 < v < math.inf),
)
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

    max_context: the longest sequence, prompt and answer together. eos_ids: every id of the vocabulary that ends a sequence.
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
    def from_directory(cls, path: str | Path, max_context: int | None = None) -> "ModelConfig":
        """Read a Hugging Face directory. Raises ModelNotFound, BadCheckpoint or UnsupportedModel.

        max_context: the longest sequence there will be, None for as long as the model takes. Beyond that: EngineError.
        """
        path = Path(path)
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no config.json")
        generation = path / "generation_config.json"
        return cls.from_dict(
            read_json(path / "config.json"),
            read_json(generation) if generation.is_file() else None,
            max_context,
        )

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        max_context: int | None = None,
    ) -> "ModelConfig":
        """Read config.json's and generation_config.json's content, else as ``from_directory``."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        _check_sizes(config)
        rope = RopeConfig.from_dict(config)
        longest = _longest(rope.max_context, max_context)
        _refuse_unsupported(architecture, config, longest)
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
            max_context=longest,
            rms_norm_eps=_eps(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
            bos_id=_first(generation.get("bos_token_id"), config.get("bos_token_id")),
            eos_ids=_eos_ids(
                _first(generation.get("eos_token_id"), config.get("eos_token_id")), config["vocab_size"]
            ),
            sampling=_sampling(generation),
        )
        model._check_heads()
        return model

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BadCheckpoint(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd")


def _architecture(config: Mapping[str, Any]) -> str:
    given = config.get("architectures") or []
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    for name in names:
        if name in FAMILIES:
            return name
    asked = ", ".join(names) or config.get("model_type") or "none named"
    raise UnsupportedModel(f"architecture {asked}; supported are {', '.join(FAMILIES)}")


def _longest(taken: int, wanted: int | None) -> int:
    """Tokens of the longest sequence. Raises EngineError where more are wanted than the model takes."""
    if wanted is not None and wanted > taken:
        raise EngineError(
            f"max_context is {wanted:,}, but the model takes {taken:,} tokens at most: lower it (HEADRACE_MAX_CONTEXT)"
        )
    return wanted or taken


def _check_sizes(config: Mapping[str, Any]) -> None:
    missing = [name for name in _REQUIRED if config.get(name) is None]
    if missing:
        raise BadCheckpoint(f"config.json lacks {', '.join(missing)}")
    for name in (*_REQUIRED, *_DEFAULTED):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise BadCheckpoint(f"config.json's {name} must be a whole number of 1 or more, not {value!r}")


def _eps(value: Any) -> float:
    if not isinstance(value, int | float):
        raise BadCheckpoint(f"config.json's rms_norm_eps must be a number, not {value!r}")
    return float(value)


def _refuse_unsupported(architecture: str, config: Mapping[str, Any], max_context: int) -> None:
    for name in _UNSUPPORTED:
        if config.get(name):
            raise UnsupportedModel(f"config.json sets {name}, which is not supported")
    if config.get("is_causal") is False:
        raise UnsupportedModel("config.json sets is_causal to false; only causal attention is supported")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"activation {activation!r}; supported is silu")
    if window := _sliding_window(architecture, config, max_context):
        raise UnsupportedModel(
            f"sliding_window {window} is shorter than the context of {max_context}; sliding attention is not supported:"
            f" with a max_context (HEADRACE_MAX_CONTEXT) of {window} or less no token would feel it"
        )


def _sliding_window(architecture: str, config: Mapping[str, Any], max_context: int) -> int | None:
    """The attention window, where a sequence can be long enough to feel it."""
    window = config.get("sliding_window", 4096)  # where the key is absent, Transformers' default holds
    if architecture == "MistralForCausalLM":
        applies = True
    elif config.get("layer_types"):
        applies = any(kind != "full_attention" for kind in config["layer_types"])
    else:
        first = config.get("max_window_layers", 28)
        applies = bool(config.get("use_sliding_window")) and first < config["num_hidden_layers"]
    return window if applies and window and window < max_context else None


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises BadCheckpoint."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path.name} is not a JSON object")
    return value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _eos_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Each once. An id beyond the vocabulary (some checkpoints have -1) is one that never comes, so it ends nothing."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise BadCheckpoint(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The defaults that are set. A wrong one would be the fault of every request that leaves it open."""
    defaults = {name: generation[name] for name, *_ in _SAMPLING if generation.get(name) is not None}
    for name, allowed, in_range in _SAMPLING:
        value = defaults.get(name, 1)
        if type(value) not in (int, float) or not in_range(value):
            raise BadCheckpoint(f"generation_config.json's {name} must be {allowed}, not {value!r}")
    return defaults
