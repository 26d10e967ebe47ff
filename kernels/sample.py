# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Choosing the next token of each row, greedily or by its distribution.

    greedy (temperature 0):  argmax_v logits_v, the lowest id among equals
    sampled:                 argmax_v (s_v + g_v)  over the kept v,   s = logits / temperature

g is Gumbel noise, so the argmax is distributed as softmax(s) over the kept tokens (https://arxiv.org/abs/1411.0030).
It is a function of (seed, position, token id) alone: the same whatever else is in the batch, on the CPU and the GPU.

Kept are the tokens that pass every filter, each a threshold on s: min_p (probability at least min_p times the largest),
top_k (at least the k-th largest s), and, over the distribution that those two leave, top_p (the tokens strictly more
likely than this one hold less than top_p). Equals stand or fall together, and the most likely token is always kept.
"""

import torch
from torch import Tensor

from headrace.kernels.dispatch import check

_MIN_TEMPERATURE = 1e-30  # keeps logits / temperature finite
_CANDIDATES = 1024  # on the CPU: how many of the largest scores are sorted before all are


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    all_greedy: bool = False,
    no_filters: bool = False,
) -> Tensor:
    """Choose one token a row. logits: [K, V]. Returns [K] int64.

    temperature, top_p, min_p: [K] fp32 (temperature 0 is greedy, top_p 1 and min_p 0 filter nothing). top_k: [K] int32
    (0 filters nothing). seeds, positions: [K] int64. all_greedy (every temperature is 0) and no_filters (top_k,
    top_p and min_p filter nothing in any row) are promises that let work be skipped.
    """
    check(logits.dim() == 2 and logits.stride(1) == 1, "logits must be [K, V], contiguous along V")
    check(len(temperature) == len(logits), "the sampling parameters need a value for each row of logits")
    return _sample_cpu(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        all_greedy=all_greedy,
        no_filters=no_filters,
    )


def _sample_cpu(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    all_greedy: bool,
    no_filters: bool,
) -> Tensor:
    """The reference, without sorting what cannot be kept and without noise for it."""
    tokens = logits.argmax(dim=-1)
    if all_greedy:
        return tokens
    for row in torch.nonzero(temperature > 0).flatten().tolist():
        one = slice(row, row + 1)
        scores = logits[one].float() / temperature[one, None].clamp(min=_MIN_TEMPERATURE)
        filtered = not no_filters and bool(top_k[row] > 0 or top_p[row] < 1 or min_p[row] > 0)
        count = _CANDIDATES if filtered and top_k[row] < _CANDIDATES else scores.shape[1]
        values, ids = scores, torch.arange(scores.shape[1])[None]
        if filtered:
            values, ids = scores.topk(min(count, scores.shape[1]), dim=-1)
            threshold = _threshold(scores, values, top_k[one], top_p[one], min_p[one])
            if values[0, -1] >= threshold[0]:  # the candidates may not hold all that is kept
                values, ids = scores.sort(dim=-1, descending=True)
                threshold = _threshold(scores, values, top_k[one], top_p[one], min_p[one])
            kept = int((values >= threshold[:, None]).sum())
            values, ids = values[:, :kept], ids[:, :kept]
        noise = gumbel_noise(seeds[one], positions[one], ids)
        tokens[row] = ids[0, (values + noise).argmax()]
    return tokens


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """sample in plain torch."""
    scores = logits.float() / temperature[:, None].clamp(min=_MIN_TEMPERATURE)
    descending = scores.sort(dim=-1, descending=True).values
    threshold = _threshold(scores, descending, top_k, top_p, min_p)
    kept = scores.masked_fill(scores < threshold[:, None], float("-inf"))
    ids = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    noisy = kept + gumbel_noise(seeds, positions, ids)
    return torch.where(temperature > 0, noisy.argmax(dim=-1), logits.argmax(dim=-1))


def _threshold(scores: Tensor, descending: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least score that each row keeps. scores: [K, V]; descending: [K, C], the C largest of them, sorted.

    Right if the result lies above the last of ``descending``, or C is V.
    """
    largest = descending[:, :1]
    by_min_p = largest + min_p[:, None].log()
    last = descending.shape[1] - 1
    by_top_k = descending.gather(1, (top_k[:, None].long() - 1).clamp(0, last))
    by_top_k = torch.where(top_k[:, None] > 0, by_top_k, float("-inf"))
    threshold = torch.maximum(by_min_p, by_top_k)

    mass = (scores - largest).exp()
    total = mass.masked_fill(scores < threshold, 0.0).sum(dim=-1, keepdim=True)
    mass = (descending - largest).exp()
    mass_above = mass.cumsum(dim=-1) - mass
    kept = (descending >= threshold) & ((mass_above < top_p[:, None] * total) | (top_p[:, None] >= 1))
    kept[:, 0] = True
    return descending.masked_fill(~kept, float("inf")).amin(dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise of each token id: [K, C] fp32 for ids [K, C], seeds and positions [K]."""
    bits = random_bits(seeds, positions, ids)
    # 31 of the 32 bits: exact as a signed int everywhere. Small values keep full relative precision, and the winners
    # are the tokens whose exponential variate is smallest, so the tail is sampled finely.
    uniform = ((bits >> 1).float() + 0.5) * 2.0**-31
    uniform = uniform.clamp(max=1 - 2.0**-24)
    series = uniform * (1 + uniform * (0.5 + uniform / 3))
    exponential = torch.where(uniform < 2.0**-10, series, -(1 - uniform).log())  # -log(1 - u)
    return -exponential.log()


def random_bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """32 random bits (as int64) for each (seed, position, token id). Shapes as in gumbel_noise."""
    key_0 = _mix(seeds & _WORD)
    key_0 = _mix(key_0 ^ (seeds >> 32) & _WORD)
    key_0 = _mix(key_0 ^ positions & _WORD)[:, None]
    key_1 = _mix(key_0 + _GOLDEN & _WORD)
    x = ids * _GOLDEN + key_0 & _WORD
    x = (x ^ x >> 16) * 0x21F0AAAD + key_1 & _WORD
    x = (x ^ x >> 15) * 0x735A2D97 & _WORD
    return x ^ x >> 15


_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that spreads every bit over all others."""
    x = (x ^ x >> 16) * 0x21F0AAAD & _WORD
    x = (x ^ x >> 15) * 0x735A2D97 & _WORD
    return x ^ x >> 15
