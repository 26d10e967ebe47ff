# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Choosing the next token of each row, greedily or by its distribution.

    greedy (temperature 0):  argmax_v logits_v, the lowest id among equals
    sampled:                 argmax_v (s_v + g_v)  over the kept v,   s = logits / temperature

g is Gumbel noise, so the argmax is distributed as softmax(s) over the kept tokens (https://arxiv.org/abs/1411.0030).
It is a function of (seed, position, token id) alone: the same whatever else is in the batch, on the CPU and the GPU.

Kept are the tokens that pass every filter, each a threshold on s: min_p (probability at least min_p times the largest),
top_k (at least the k-th largest s), and, over the distribution that those two leave, top_p (the tokens strictly more
likely than this one hold less than top_p). Equals stand or fall together, and the most likely token is always kept.

A row with a logit that is NaN or plus infinity has no distribution: NO_TOKEN is chosen. Minus infinity is a token kept out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dispatch import LAUNCH_OPTIONS, check, next_power_of_2, use_triton

NO_TOKEN = -1
"""What is chosen where there is nothing to choose from."""

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32, but for minus infinity
_MIN_TEMPERATURE = 1e-15  # keeps logits / temperature finite, also of edited logits
_CANDIDATES = 1024  # on the CPU: how many of the largest scores are sorted before all are


@triton.jit
def _mix_word(x):
    """_mix for a scalar of the kernel: uint32 to uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _noise_bits(ids, key_0, key_1):
    """random_bits for one row: token ids (int32) and the row's two keys (uint32)."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key_0
    x = (x ^ (x >> 16)) * 0x21F0AAAD + key_1
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _gumbel(bits):
    """gumbel_noise from its bits."""
    uniform = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    series = uniform * (1 + uniform * (0.5 + uniform / 3))
    return -tl.log(tl.where(uniform < 2.0**-10, series, -tl.log(1 - uniform)))


@triton.jit
def _may_win(score, bits, best):
    """Whether score + gumbel noise may exceed best, without taking the noise's logarithms; also of any score that is NaN.

    score - log(-log(1 - u)) > best needs -log(1 - u) < exp(score - best), and u is less than its left side. The bits'
    first 23, as the mantissa of a float in [1, 2), give u from below. best must not be minus infinity.
    """
    uniform = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return ~(uniform > tl.exp(score - best) * 1.001)


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """A signed integer that orders as the fp32 value x does; SHIFT drops the bits that a narrow dtype lacks."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: minus zero equals zero
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _search(row_ptr, vocab, some, largest, target, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the target-th largest score. some: [BLOCK] of the row's scores, the largest among them.

    low is always reached by enough scores, high never. What some of the scores reach bounds what all do from below, so
    a search in registers comes first; then each pass over the row quarters the interval that is left.
    """
    low = _ordered(tl.full([], float("-inf"), tl.float32), SHIFT).to(tl.int64)
    top = _ordered(largest, SHIFT).to(tl.int64)
    high = top + 1
    some_keys = _ordered(some, SHIFT)
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.sum((some_keys >= middle.to(tl.int32)).to(tl.int32)) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    high = top + 1
    while high - low > 1:
        first = low + tl.maximum((high - low) // 4, 1)
        second = low + tl.maximum((high - low) // 2, 1)
        third = low + tl.maximum((high - low) * 3 // 4, 1)
        above_1 = tl.zeros([BLOCK], tl.int32)
        above_2 = tl.zeros([BLOCK], tl.int32)
        above_3 = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            key = _ordered(x, SHIFT)
            above_1 += (key >= first.to(tl.int32)).to(tl.int32)
            above_2 += (key >= second.to(tl.int32)).to(tl.int32)
            above_3 += (key >= third.to(tl.int32)).to(tl.int32)
        count_1, count_2, count_3 = tl.sum(above_1), tl.sum(above_2), tl.sum(above_3)
        new_low = tl.where(count_1 >= target, first, low)
        new_low = tl.where(count_2 >= target, second, new_low)
        new_low = tl.where(count_3 >= target, third, new_low)
        high = tl.where(count_3 >= target, high, third)
        high = tl.where(count_2 >= target, high, second)
        high = tl.where(count_1 >= target, high, first)
        low = new_low
        # Exactly so many: nothing lies between them and a higher threshold that would also do.
        hit = (count_1 == target) | (count_2 == target) | (count_3 == target)
        high = tl.where(hit, low + 1, high)
    return low.to(tl.int32)


@triton.jit
def _masses(
    row_ptr, vocab, largest, inverse_temperature, least, least_key, chosen,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The probability mass of what top_k and min_p keep, and of the part of it above a key; the largest score's is 1."""
    kept = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        key = _ordered(x, SHIFT)
        mass = tl.where((x >= least) & (key >= least_key), tl.exp((x - largest) * inverse_temperature), 0.0)
        kept += mass
        above += tl.where(key > chosen, mass, 0.0)
    return tl.sum(kept), tl.sum(above)


@triton.jit
def _draw(
    row_ptr, vocab, sampled, inverse_temperature, least, least_key, key_0, key_1,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's choice among the scores from least and least_key on, and its largest score (if FILTERED).

    -1 if a logit is NaN or infinite, which is left behind in best, or in maxima where filters take it out before. That
    costs no instruction for each logit: comparisons and maxima that NaN passes take no longer than others.
    """
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = lanes
    best_of_all = _LOWEST
    maxima = best
    upcoming = tl.load(row_ptr + lanes, mask=lanes < vocab, other=float("-inf"))
    for start in range(0, vocab, BLOCK):
        ids = start + lanes
        x = upcoming.to(tl.float32)
        # Under way while this block is worked on: the branches below keep the compiler from doing it.
        upcoming = tl.load(row_ptr + BLOCK + ids, mask=BLOCK + ids < vocab, other=float("-inf"))
        if sampled:
            if FILTERED:
                maxima = tl.maximum(maxima, x, propagate_nan=tl.PropagateNan.ALL)
                x = tl.where((x >= least) & (_ordered(x, SHIFT) >= least_key), x, float("-inf"))
            score = x * inverse_temperature
            bits = _noise_bits(ids, key_0, key_1)
            # After the first few blocks hardly any holds a token that may win.
            if tl.max(_may_win(score, bits, best_of_all).to(tl.int32)) > 0:
                score = tl.where(x < float("inf"), score + _gumbel(bits), float("inf"))
                better = score > best  # strictly: the lowest id wins in each lane, and below among the lanes
                best = tl.where(better, score, best)
                best_ids = tl.where(better, ids, best_ids)
                best_of_all = tl.maximum(tl.max(best), _LOWEST)
        else:
            best_ids = tl.where(x > best, ids, best_ids)
            best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    winners = tl.where(best == tl.max(best), best_ids, 2147483647)
    sound = best < float("inf")
    if FILTERED:
        sound &= maxima < float("inf")
    return tl.min(tl.where(sound, winners, -1)), tl.max(maxima)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [K, V], rows row_stride apart
    temperature_ptr,  # [S] fp32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] fp32
    min_p_ptr,  # [S] fp32
    seeds_ptr,  # [S] int64
    lines_ptr,  # [K] int64, read when HAS_LINES
    positions_ptr,  # [K] int64
    tokens_ptr,  # [K] int64
    last_tokens_ptr,  # [S] int64, written when HAS_LINES
    row_stride,
    vocab,
    MIN_TEMPERATURE: tl.constexpr,
    HAS_LINES: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    NO_FILTERS: tl.constexpr,
    SHIFT: tl.constexpr,  # the low bits of an fp32 that the logits' dtype cannot set
    BLOCK: tl.constexpr,
):
    """One program chooses one row's token. The row is read once, and a few times more where filters apply.

    top_p needs no threshold: whether a token passes follows from the mass above it. So draw first, then look. Most draws
    pass, with a probability of top_p at least; the next one is among the likelier tokens, which hold all that pass.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    line = row
    if HAS_LINES:
        line = tl.load(lines_ptr + row)

    sampled = False
    inverse_temperature = 1.0
    least = float("-inf")
    least_key = -2147483648
    key_0 = tl.full([], 0, tl.uint32)
    key_1 = key_0
    if not ALL_GREEDY:
        temperature = tl.load(temperature_ptr + line)
        sampled = temperature > 0
        inverse_temperature = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
        seed = tl.load(seeds_ptr + line)
        key_0 = _mix_word(seed.to(tl.uint32))
        key_0 = _mix_word(key_0 ^ (seed >> 32).to(tl.uint32))
        key_0 = _mix_word(key_0 ^ tl.load(positions_ptr + row).to(tl.uint32))
        key_1 = _mix_word(key_0 + 0x9E3779B1)

    token = tl.full([], 0, tl.int32)
    if ALL_GREEDY or NO_FILTERS:
        token, _ = _draw(
            row_ptr, vocab, sampled, inverse_temperature, least, least_key, key_0, key_1, False, SHIFT, BLOCK
        )
    else:
        top_k = tl.load(top_k_ptr + line)
        top_p = tl.load(top_p_ptr + line)
        min_p = tl.load(min_p_ptr + line)
        if sampled & ((top_k > 0) | (min_p > 0)):
            maxima = tl.full([BLOCK], float("-inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
                maxima = tl.maximum(maxima, x)
            largest = tl.max(maxima)
            least = tl.minimum(largest + tl.log(min_p) * temperature, largest)
            if (top_k > 0) & (top_k < vocab):
                least_key = _search(row_ptr, vocab, maxima, largest, top_k, SHIFT, BLOCK)

        from_key = least_key
        drawing = True
        while drawing:
            token, highest = _draw(
                row_ptr,
                vocab,
                sampled,
                inverse_temperature,
                least,
                from_key,
                key_0,
                key_1,
                True,
                SHIFT,
                BLOCK,
            )
            drawing = False
            if sampled & (top_p < 1) & (token >= 0):
                chosen = _ordered(tl.load(row_ptr + token).to(tl.float32), SHIFT)
                kept, above = _masses(
                    row_ptr, vocab, highest, inverse_temperature, least, least_key, chosen, SHIFT, BLOCK
                )
                # The likeliest always passes. No mass, or a choice below what may be drawn: all scores overflow, and
                # there is nothing to choose from.
                drawing = (above >= kept * top_p) & (chosen < _ordered(highest, SHIFT))
                drawing = drawing & (kept > 0) & (chosen >= from_key)
                from_key = chosen + 1
    tl.store(tokens_ptr + row, token.to(tl.int64))
    if HAS_LINES:
        tl.store(last_tokens_ptr + line, token.to(tl.int64))


# Of the 32 bits of an fp32, how many at the end are zero for every value of a narrower dtype.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    lines: Tensor | None = None,
    last_tokens: Tensor | None = None,
    all_greedy: bool = False,
    no_filters: bool = False,
) -> Tensor:
    """Choose one token a row. logits: [K, V]. Returns [K] int64, NO_TOKEN for rows with a logit that is NaN or infinite.

    temperature, top_p, min_p: [S] fp32 (temperature 0 is greedy, top_p 1 and min_p 0 filter nothing). top_k: [S] int32
    (0 filters nothing). seeds: [S] int64. positions: [K] int64. lines: [K] int64, which of the S parameters each row takes;
    last_tokens, [S] int64, then gets the tokens at these lines. Without lines S is K, row by row. all_greedy (every
    temperature is 0) and no_filters (top_k, top_p and min_p filter nothing in any row) are promises that let work be skipped.
    """
    check(logits.dim() == 2 and logits.stride(1) == 1, "logits must be [K, V], contiguous along V")
    rows, vocab = logits.shape
    chosen_by = temperature if lines is None else lines
    check(
        len(chosen_by) == rows,
        "the sampling parameters need a value, or lines a line, for each row of logits",
    )
    check((lines is None) == (last_tokens is None), "lines and last_tokens come together")
    if not use_triton(logits):
        if lines is not None:
            temperature, top_k, top_p, min_p, seeds = (
                of_all[lines] for of_all in (temperature, top_k, top_p, min_p, seeds)
            )
        tokens = _sample_cpu(
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
        if lines is not None and last_tokens is not None:
            last_tokens[lines] = tokens
        return tokens
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block, warps = (8192, 16) if all_greedy else (2048, 4) if no_filters else (4096, 16)
        block = min(next_power_of_2(vocab), block)
        _sample_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, seeds, lines, positions, tokens, last_tokens,
            logits.stride(0), vocab,
            MIN_TEMPERATURE=_MIN_TEMPERATURE, HAS_LINES=lines is not None, ALL_GREEDY=all_greedy, NO_FILTERS=no_filters,
            SHIFT=_UNUSED_BITS[logits.dtype], BLOCK=block, num_warps=max(min(warps, block // 128), 1), **LAUNCH_OPTIONS,
        )  # fmt: skip
    return tokens


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
    tokens = _likeliest(logits)
    if all_greedy:
        return tokens
    for row in torch.nonzero((temperature > 0) & (tokens != NO_TOKEN)).flatten().tolist():
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


def _likeliest(logits: Tensor) -> Tensor:
    """[K] the lowest id among the largest logits of each row, NO_TOKEN where one is NaN, which counts as largest, or infinite."""
    tokens = logits.argmax(dim=-1)
    largest = logits.gather(1, tokens[:, None])[:, 0]
    return tokens.where(largest < float("inf"), NO_TOKEN)


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
    scores = filtered_reference(logits, temperature, top_k, top_p, min_p)
    ids = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    noisy = scores + gumbel_noise(seeds, positions, ids)
    likeliest = _likeliest(logits)
    return torch.where((temperature > 0) & (likeliest != NO_TOKEN), noisy.argmax(dim=-1), likeliest)


def filtered_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """s of the kept tokens, minus infinity for the others: [K, V] fp32. Arguments as in ``sample``."""
    scores = logits.float() / temperature[:, None].clamp(min=_MIN_TEMPERATURE)
    descending = scores.sort(dim=-1, descending=True).values
    threshold = _threshold(scores, descending, top_k, top_p, min_p)
    return scores.masked_fill(scores < threshold[:, None], float("-inf"))


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
