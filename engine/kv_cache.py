"""The paged KV cache on the device, and what a step's layers need to use it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.numerics import FAST, Numerics
from headrace.kernels.decode_attention import Splits, decode_attention, split_keys
from headrace.kernels.prefill_attention import prefill_attention
from headrace.kernels.prefill_hopper import hopper_tiles
from headrace.kernels.query_tiles import QueryTiles
from headrace.kernels.rope_cache import rope_and_cache
from headrace.kernels.shared_prefix import SharedPrefixes


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps for each token. Only ``full`` attention exists today."""

    num_kv_heads: int
    head_dim: int
    kind: str = "full"

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V for one token."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """One arena of equal-byte pages: for each layer, K and V as ``[num_blocks, kv_heads, block_size, head_dim]``.

    A (block, head) tile is contiguous, so that one load covers it.
    """

    def __init__(
        self, specs: list[KVSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shapes = [(2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim) for spec in specs]
        self.arena = torch.zeros(
            sum(torch.Size(shape).numel() for shape in shapes), dtype=dtype, device=device
        )
        self.layers: list[tuple[Tensor, Tensor]] = []
        start = 0
        for shape in shapes:
            size = torch.Size(shape).numel()
            k, v = self.arena[start : start + size].view(shape)
            self.layers.append((k, v))
            start += size

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of K and V of one token in the first layer."""
        k, v = self.layers[0]
        return int(k[0, :, 0].nbytes + v[0, :, 0].nbytes)


class Rows(NamedTuple):
    """Some of a step's R rows, as attention takes them: slots, context_lens [R] int32; query_start [R + 1] int32."""

    slots: Tensor
    query_start: Tensor
    context_lens: Tensor


@dataclass(slots=True)
class StepContext:
    """What the layers need of a step besides ids and positions. T tokens, R rows, S slots, M blocks a slot.

    Rows that decode (one query token each) come first, ``num_decodes`` of them; prefill chunks follow.

    slot_mapping: [T] int64, where each token's K and V go (block * block_size + offset; -1: nowhere).
    slots: [R] int32, each row's line of ``block_tables`` [S, M] int32. query_start: [R + 1] int32.
    context_lens: [R] int32, keys in all, this step's included. shared: prefixes that decode rows share, if any.
    numerics: the variant of attention.
    """

    kv: KVCache
    slot_mapping: Tensor
    block_tables: Tensor
    slots: Tensor
    query_start: Tensor
    context_lens: Tensor
    num_decodes: int
    max_context_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    shared: SharedPrefixes | None = None
    numerics: Numerics = FAST
    _decodes: Rows | None = field(init=False, default=None)
    _prefills: Rows | None = field(init=False, default=None)
    _splits: Splits | None = field(init=False, default=None)
    _tiles: QueryTiles | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Part the rows by the kernel that they take, and cut their keys or queries for it, once for all layers."""
        invariant = self.numerics.batch_invariant
        n = 0 if invariant else self.num_decodes  # a decode is then a prefill of one token
        if n:
            self._decodes = Rows(self.slots[:n], self.query_start[: n + 1], self.context_lens[:n])
            self._splits = split_keys(
                self._decodes.slots, self._decodes.context_lens, self.max_context_len, self.num_kv_heads,
                self.kv.arena.itemsize, self.shared,
            )  # fmt: skip
        if len(self.slots) > n:
            self._prefills = Rows(self.slots[n:], self.query_start[n:] - n, self.context_lens[n:])
            if not invariant:
                tokens = len(self.slot_mapping) - n
                self._tiles = hopper_tiles(*self._prefills, tokens, self.num_heads, self.kv.layers[0][0])

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Rotate q and k, store K and V, attend. qkv: [T, (Hq + 2 Hkv) D]. Returns [T, Hq * D]."""
        k_cache, v_cache = self.kv.layers[layer]
        q = rope_and_cache(
            qkv, positions, cos_sin, k_cache, v_cache, self.slot_mapping,
            self.num_heads, self.num_kv_heads, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        out = torch.empty_like(q)
        n = 0
        if (rows := self._decodes) is not None:
            n = rows.slots.shape[0]
            decode_attention(
                q[:n], k_cache, v_cache, self.block_tables, rows.slots, rows.context_lens, self.max_context_len,
                self.scale, out=out[:n], shared=self.shared, splits=self._splits,
            )  # fmt: skip
        if (rows := self._prefills) is not None:
            prefill_attention(
                q[n:], k_cache, v_cache, self.block_tables, rows.slots, rows.query_start, rows.context_lens, self.scale,
                out[n:], self._tiles, batch_invariant=self.numerics.batch_invariant,
            )  # fmt: skip
        return out.flatten(1)
