"""The one dense decoder behind Llama, Mistral, Qwen2 and Qwen3: they differ in biases and in qk-norm alone.

T tokens of many sequences are one flat batch; which token belongs to whom is the StepContext's business. Nothing here
waits for the device or looks at a value, so that a forward can be captured as a CUDA graph.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from headrace.engine.errors import BadCheckpoint, UnsupportedModel
from headrace.engine.kv_cache import KVSpec, StepContext
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.layers import Embedding, Linear, Named
from headrace.engine.models.rope import cos_sin_table
from headrace.engine.numerics import FAST, Numerics
from headrace.kernels.rms_norm import rms_norm

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Attention:
    """Grouped-query attention with rotary positions; q and k are normalised per head where the family does so."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        name = f"model.layers.{layer}.self_attn"
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.name, self.layer, self.eps = name, layer, config.rms_norm_eps
        self.qkv = Linear(
            config.hidden_size,
            {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv},
            device,
            dtype,
            config.qkv_bias,
            numerics,
        )
        self.out = Linear(q, {f"{name}.o_proj": config.hidden_size}, device, dtype, config.o_bias, numerics)
        self.q_norm = torch.ones(config.head_dim, device=device, dtype=dtype) if config.qk_norm else None
        self.k_norm = torch.ones(config.head_dim, device=device, dtype=dtype) if config.qk_norm else None

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, ctx: StepContext) -> Tensor:
        """[T, H] -> [T, Hq * D], what ``out`` takes."""
        qkv = self.qkv.apply(x)
        return ctx.attend(self.layer, qkv, positions, cos_sin, self.q_norm, self.k_norm, self.eps)

    def destinations(self) -> Named:
        yield from self.qkv.destinations()
        yield from self.out.destinations()
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{self.name}.q_norm.weight", self.q_norm
            yield f"{self.name}.k_norm.weight", self.k_norm


class FeedForward:
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        name, width = f"model.layers.{layer}.mlp", config.intermediate_size
        self.gate_up = Linear(
            config.hidden_size,
            {f"{name}.gate_proj": width, f"{name}.up_proj": width},
            device,
            dtype,
            config.mlp_bias,
            numerics,
        )
        self.down = Linear(
            width, {f"{name}.down_proj": config.hidden_size}, device, dtype, config.mlp_bias, numerics
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, I], what ``down`` takes."""
        return self.gate_up.swiglu(x)

    def destinations(self) -> Named:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()


class Layer:
    """Attention, then feed-forward, each behind a norm."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        self.name = f"model.layers.{layer}"
        self.attention = Attention(config, layer, device, dtype, numerics)
        self.feed_forward = FeedForward(config, layer, device, dtype, numerics)
        self.input_norm = torch.ones(config.hidden_size, device=device, dtype=dtype)
        self.post_norm = torch.ones_like(self.input_norm)

    def destinations(self) -> Named:
        yield from self.attention.destinations()
        yield from self.feed_forward.destinations()
        yield f"{self.name}.input_layernorm.weight", self.input_norm
        yield f"{self.name}.post_attention_layernorm.weight", self.post_norm


class Model:
    """A decoder's weights and its forward. Weights are uninitialised until ``load`` or ``random_init``."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, numerics: Numerics = FAST
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.embedding = Embedding(config.vocab_size, config.hidden_size, "model.embed_tokens", device, dtype)
        self.layers = [Layer(config, layer, device, dtype, numerics) for layer in range(config.num_layers)]
        self.norm = torch.ones(config.hidden_size, device=device, dtype=dtype)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, "lm_head", device, dtype)
        )
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, device)

    def kv_specs(self) -> list[KVSpec]:
        """What each layer keeps for each token."""
        return [KVSpec(self.config.num_kv_heads, self.config.head_dim) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """ids, positions: [T] int64. Returns the normalised hidden states [T, H]; K and V are in the cache then."""
        eps = self.config.rms_norm_eps
        residual = self.embedding.apply(ids)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        x = rms_norm(residual, self.layers[0].input_norm, eps)
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            heads = layer.attention.forward(x, positions, self.cos_sin, ctx)
            x = layer.attention.out.add(heads, residual, layer.post_norm, eps)
            x = layer.feed_forward.down.add(layer.feed_forward.forward(x), residual, next_norm, eps)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[K, H] -> [K, V], in the model's dtype."""
        return self.numerics.linear(hidden, self.head.weight, None)

    @torch.inference_mode()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every weight from a checkpoint.

        Raises BadCheckpoint that names what is missing, surplus or misshapen, or UnsupportedModel for quantised weights.
        """
        wanted = dict(self.destinations())
        surplus = []
        for name, tensor in tensors:
            if f"model.{name}" in wanted:  # saved without its head, as models that embed are
                name = f"model.{name}"
            if name in wanted:
                _fill(wanted.pop(name), tensor, name)
            elif not self._is_redundant(name):
                surplus.append(name)
        if wanted:
            raise BadCheckpoint(f"the checkpoint lacks {_some(sorted(wanted))}")
        if surplus:
            raise BadCheckpoint(f"the checkpoint holds tensors that no layer takes: {_some(surplus)}")

    @torch.inference_mode()
    def random_init(self, seed: int = 0) -> None:
        """Matrices from N(0, 0.02), norms one, biases zero; made where the weights live."""
        generator = torch.Generator(self.cos_sin.device).manual_seed(seed)
        for name, tensor in self.destinations():
            if tensor.dim() == 2:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(0.0 if name.endswith(".bias") else 1.0)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a checkpoint by its name, and the memory that it fills."""
        yield from self.embedding.destinations()
        for layer in self.layers:
            yield from layer.destinations()
        yield "model.norm.weight", self.norm
        if self.head is not self.embedding:
            yield from self.head.destinations()

    def _is_redundant(self, name: str) -> bool:
        """A copy of a tied head, or a frequency table that old checkpoints carry."""
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.head is self.embedding
        )


def build_model(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype, numerics: Numerics = FAST
) -> Model:
    """An empty model: call ``load`` or ``random_init`` next."""
    return Model(config, torch.device(device), dtype, numerics)


def _fill(destination: Tensor, tensor: Tensor, name: str) -> None:
    if destination.shape != tensor.shape:
        raise BadCheckpoint(
            f"{name} has shape {list(tensor.shape)}; the config asks for {list(destination.shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}; quantised weights are not supported"
        )
    destination.copy_(tensor)


def _some(names: list[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
