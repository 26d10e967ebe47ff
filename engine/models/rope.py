"""Rotary position embeddings (RoFormer, arXiv:2104.09864) and their scaling rules, as Transformers reads them.

Pair i of a head of D turns by ``position / theta ** (2i / D)`` radians. A rule changes these frequencies, and may
scale cos and sin by a factor. Everything is fp32, each rule in Transformers' order of operations: at position 10,000
one rounding more is an angle 1e-3 off.

Two rules depend on a sequence's length (``dynamic``, ``longrope``). One table serves every sequence of a batch, so
these are served up to the length at which they would switch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import BadCheckpoint, UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rule: ``kind`` names it, ``params`` are its numbers under Transformers' names.

    max_positions: the config's max_position_embeddings. original_context: the length that the rule scales from.
    """

    theta: float
    kind: str
    params: Mapping[str, Any]
    max_positions: int
    original_context: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read config.json, with ``rope_parameters`` (Transformers 5) or ``rope_theta`` and ``rope_scaling``."""
        params = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(params, dict):
            raise BadCheckpoint(f"rope_scaling must be an object, not {params!r}")
        if any(isinstance(value, dict) for value in params.values()):
            raise UnsupportedModel("rope_parameters differ between layers, which is not supported")
        if params.get("llama_4_scaling_beta"):
            raise UnsupportedModel("rope_parameters sets llama_4_scaling_beta, which is not supported")
        kind = params.get("rope_type") or params.get("type") or "default"
        if not isinstance(kind, str) or kind not in _RULES:
            raise UnsupportedModel(f"RoPE scaling {kind!r}; supported are {', '.join(_RULES)}")
        partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor {partial}: only whole heads are rotated")
        original = "original_max_position_embeddings"
        longest = config["max_position_embeddings"]
        return cls(
            theta=_above_0(params.get("rope_theta") or config.get("rope_theta") or 10_000.0, "rope_theta"),
            kind=kind,
            params=params,
            max_positions=longest,
            original_context=int(_above_0(config.get(original) or params.get(original) or longest, original)),
        )

    @property
    def max_context(self) -> int:
        """The longest sequence that one table can serve."""
        if self.kind == "yarn":
            return max(self.max_positions, int(self.original_context * self.factor))
        return self.original_context if self.kind == "longrope" else self.max_positions

    @property
    def factor(self) -> float:
        """How far the context is stretched."""
        if self.params.get("factor") is None and self.kind in ("yarn", "longrope"):
            return self.max_positions / self.original_context
        return _above_0(self.number("factor"), "factor")

    def number(self, name: str) -> float:
        """A number that the rule cannot do without."""
        value = self.params.get(name)
        if not isinstance(value, int | float):
            raise BadCheckpoint(f"RoPE scaling {self.kind!r} needs a number for {name!r}, not {value!r}")
        return float(value)


def _above_0(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadCheckpoint(f"RoPE's {name} must be a number above 0, not {value!r}")
    return float(value)


def cos_sin_table(rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """[max_context, head_dim] fp32: for each position the cosines of its angles, then their sines."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies, factor = _RULES[rope.kind](rope, periods)
    angles = torch.arange(rope.max_context, device=device).float()[:, None] * frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def _default(rope: RopeConfig, periods: Tensor) -> tuple[Tensor, float]:
    """As trained. Also ``dynamic`` up to ``max_position_embeddings``, past which it would grow theta."""
    return 1.0 / periods, 1.0


def _linear(rope: RopeConfig, periods: Tensor) -> tuple[Tensor, float]:
    """Position interpolation, arXiv:2306.15595."""
    return 1.0 / periods / rope.factor, 1.0


def _llama3(rope: RopeConfig, periods: Tensor) -> tuple[Tensor, float]:
    """Pairs that turn seldom over the original context are slowed, those that turn often kept, a blend between."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    base = 1.0 / periods
    turns = rope.original_context / (2 * math.pi / base)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * base / rope.factor + kept * base, 1.0


def _yarn(rope: RopeConfig, periods: Tensor) -> tuple[Tensor, float]:
    """YaRN, arXiv:2309.00071: as llama3, but the blend is a ramp over the dimensions; attention is tempered."""
    params, dim = rope.params, 2 * len(periods)

    def dimension(turns: float) -> float:
        """The dimension that turns this often over the original context."""
        return dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept, _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.params.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.params.get("mscale") and rope.params.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _longrope(rope: RopeConfig, periods: Tensor) -> tuple[Tensor, float]:
    """LongRoPE, arXiv:2402.13753, up to the original context: each frequency has a divisor of its own."""
    divisors = rope.params.get("short_factor")
    if (
        not isinstance(divisors, list)
        or len(divisors) != len(periods)
        or not all(isinstance(divisor, int | float) for divisor in divisors)
    ):
        raise BadCheckpoint(
            f"RoPE scaling 'longrope' needs a list of {len(periods)} numbers for 'short_factor'"
        )
    if rope.params.get("attention_factor") is not None:
        attention = rope.number("attention_factor")
    elif rope.factor <= 1:
        attention = 1.0
    else:
        attention = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0 / (torch.tensor(divisors) * periods), attention


_RULES: dict[str, Callable[[RopeConfig, Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
