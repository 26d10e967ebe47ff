# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What stands between the qkv projection and attention, in one pass over qkv.

For each token: optional RMS norm of every query and key head (Qwen3), rotary position embedding, and the store of key
and value into the paged cache.

    rope(x)[:D/2] = x1 cos - x2 sin,   rope(x)[D/2:] = x2 cos + x1 sin      x1, x2: the halves of x (rotate-half)

qkv: [T, (Hq + 2 Hkv) D]; cos_sin: [P, D] fp32, cos then sin; caches: [N, Hkv, B, D]. A token's slot is
block * B + offset; -1 stores nothing. Everything is computed in fp32 from the fp32 table and rounded once.

Values that are no finite numbers are stored as zeros. A block's next owner multiplies what it has not overwritten by weights
of zero, and a NaN would be in its sums then. The owner itself loses nothing: its key is NaN where the value was not finite,
and so is all that attends to it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, next_power_of_2, use_triton
from headrace.kernels.rms_norm import rms_norm_reference


@triton.jit
def _norm_and_rotate(
    head_ptr,  # pointers to the first D/2 values of each head: [HEADS, HALF]
    norm_ptr,  # [D], read when HAS_NORM
    cos,  # [1, HALF]
    sin,  # [1, HALF]
    mask,  # [HEADS, HALF]
    half,
    eps,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    """The two rotated halves of some heads, in fp32."""
    first_raw = tl.load(head_ptr, mask=mask, other=0.0)
    second_raw = tl.load(head_ptr + half, mask=mask, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if HAS_NORM:
        columns = tl.arange(0, HALF)
        weight_1 = tl.load(norm_ptr + columns, mask=columns < half, other=0.0)[None, :].to(tl.float32)
        weight_2 = tl.load(norm_ptr + half + columns, mask=columns < half, other=0.0)[None, :].to(tl.float32)
        variance = tl.sum(first * first + second * second, axis=1)[:, None] / (2 * half)
        scale = tl.rsqrt(variance + eps)
        dtype = first_raw.dtype
        # Rounded where Transformers rounds: after the norm and after its weight.
        first = ((first * scale).to(dtype).to(tl.float32) * weight_1).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * weight_2).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_pair(k_ptr, v_ptr, k, v, mask):
    """Store a part of keys, in fp32, and the same part of values: where one is no finite number, NaN and zero."""
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    tl.store(k_ptr, tl.where(finite, k, float("nan")).to(k_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr, tl.where(finite, v, 0.0).to(v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_cache_kernel(
    qkv_ptr,  # [T, (Hq + 2 Hkv) D], rows qkv_stride apart
    positions_ptr,  # [T] int64
    cos_sin_ptr,  # [P, D] fp32
    q_norm_ptr,  # [D], read when HAS_NORM
    k_norm_ptr,  # [D], read when HAS_NORM
    slot_mapping_ptr,  # [T] int64
    q_out_ptr,  # [T, Hq, D] contiguous
    k_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    v_cache_ptr,  # [N, Hkv, B, D], blocks block_stride apart
    qkv_stride,
    block_stride,
    eps,
    num_heads,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,  # Hq, rounded up to a power of two
    KV_HEADS: tl.constexpr,  # Hkv, rounded up to a power of two
    HALF: tl.constexpr,  # D / 2, rounded up to a power of two
):
    """One program covers one token."""
    token = tl.program_id(0).to(tl.int64)
    half = HEAD_DIM // 2
    columns = tl.arange(0, HALF)[None, :]
    position = tl.load(positions_ptr + token)
    slot = tl.load(slot_mapping_ptr + token)
    table = cos_sin_ptr + position * HEAD_DIM + columns
    cos = tl.load(table, mask=columns < half, other=0.0)
    sin = tl.load(table + half, mask=columns < half, other=0.0)

    heads = tl.arange(0, HEADS)[:, None]
    mask = (heads < num_heads) & (columns < half)
    offsets = heads * HEAD_DIM + columns
    qkv_row = qkv_ptr + token * qkv_stride
    first, second = _norm_and_rotate(qkv_row + offsets, q_norm_ptr, cos, sin, mask, half, eps, HAS_NORM, HALF)
    q_row = q_out_ptr + token * num_heads * HEAD_DIM + offsets
    dtype = q_out_ptr.dtype.element_ty
    tl.store(q_row, first.to(dtype), mask=mask)
    tl.store(q_row + half, second.to(dtype), mask=mask)

    if slot >= 0:
        kv_heads = tl.arange(0, KV_HEADS)[:, None]
        kv_mask = (kv_heads < num_kv_heads) & (columns < half)
        k_row = qkv_row + (num_heads + kv_heads) * HEAD_DIM + columns
        k_first, k_second = _norm_and_rotate(k_row, k_norm_ptr, cos, sin, kv_mask, half, eps, HAS_NORM, HALF)
        v_row = k_row + num_kv_heads * HEAD_DIM
        v_first = tl.load(v_row, mask=kv_mask, other=0.0)
        v_second = tl.load(v_row + half, mask=kv_mask, other=0.0)

        target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
        cached = target + kv_heads * (BLOCK_SIZE * HEAD_DIM) + columns
        _store_pair(k_cache_ptr + cached, v_cache_ptr + cached, k_first, v_first, kv_mask)
        _store_pair(k_cache_ptr + cached + half, v_cache_ptr + cached + half, k_second, v_second, kv_mask)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norm and rotate q and k, store k and v in the cache. Shapes as in the module's docstring.

    positions, slot_mapping: [T] int64. q_norm, k_norm: [D], both or neither. Rows of qkv and blocks of the caches may
    be strided. Returns q as [T, Hq, D].
    """
    tokens, width = qkv.shape
    head_dim = cos_sin.shape[1]
    check(width == (num_heads + 2 * num_kv_heads) * head_dim, "qkv must be [T, (Hq + 2 Hkv) D]")
    check(head_dim % 2 == 0 and cos_sin.dtype == torch.float32, "cos_sin must be [P, D] fp32 with D even")
    check((q_norm is None) == (k_norm is None), "q_norm and k_norm come together")
    check(qkv.stride(1) == 1 and cos_sin.is_contiguous(), "qkv and cos_sin must be contiguous along D")
    check(k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(), "the caches must match")
    if not use_triton(qkv):
        return rope_and_cache_reference(
            qkv,
            positions,
            cos_sin,
            k_cache,
            v_cache,
            slot_mapping,
            num_heads,
            num_kv_heads,
            q_norm,
            k_norm,
            eps,
        )
    check(k_cache[0].is_contiguous(), "a cache block must be contiguous")
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        heads = next_power_of_2(num_heads)
        half = next_power_of_2(head_dim // 2)
        _rope_cache_kernel[(tokens,)](
            qkv, positions, cos_sin, q_norm, k_norm, slot_mapping, q, k_cache, v_cache,
            qkv.stride(0), k_cache.stride(0), eps, num_heads, num_kv_heads,
            BLOCK_SIZE=k_cache.shape[2], HEAD_DIM=head_dim, HAS_NORM=q_norm is not None,
            HEADS=heads, KV_HEADS=next_power_of_2(num_kv_heads), HALF=half,
            num_warps=min(max(heads * half // 512, 1), 8), **LAUNCH_OPTIONS,
        )  # fmt: skip
    return q


def rope_and_cache_reference(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """rope_and_cache in plain torch."""
    head_dim = cos_sin.shape[1]
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)

    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)

    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        stored = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[stored], k[stored], v[stored]
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = k.where(v.isfinite(), float("nan")).to(k_cache.dtype)
    v_cache[block, :, offset] = v.where(v.isfinite(), 0.0).to(v_cache.dtype)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
