"""The least time that a workload can take on the hardware: its products, its attention and its KV traffic, added up.

A product takes the larger of its arithmetic, at 790 TFLOP/s in bf16, and of its weights read once a step; each KV byte is
read once a decode step, at 4.3 TB/s: rates measured on an H200. It is an estimate, not a proof: attention and products could
overlap.
"""

from collections.abc import Mapping
from typing import Any

FLOPS_PER_S, BYTES_PER_S = 790e12, 4.3e12


def floor_seconds(shape: Mapping[str, Any], requests: list) -> float:
    """The hardware's floor for a workload on this shape.

    A prefix that prompts share is computed once, and read once a decode step, however many rows share it.
    """
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, (shape.get("num_key_value_heads") or heads) * head_dim
    intermediate = shape["intermediate_size"]
    shared, unique = shared_prefixes([prompt for prompt, _ in requests])
    own = [len(prompt) - common for (prompt, _), common in zip(requests, shared, strict=True)]
    steps = max(out for _, out in requests)
    tokens_in = sum(own) + unique
    tokens_out = sum(out for _, out in requests)
    products = layers * sum(
        product_seconds(weights, tokens_in + tokens_out, steps)
        for weights in (hidden * (q + 2 * kv), q * hidden, 2 * hidden * intermediate, intermediate * hidden)
    ) + product_seconds(hidden * shape["vocab_size"], tokens_out, steps)
    attention = sum(
        4 * layers * q * (common + length / 2) * length for common, length in zip(shared, own, strict=True)
    )
    contexts = unique * steps + sum(
        length * out + out * out / 2 for length, (_, out) in zip(own, requests, strict=True)
    )
    kv_bytes = contexts * layers * 2 * kv * 2
    return products + attention / FLOPS_PER_S + kv_bytes / BYTES_PER_S


def product_seconds(weights: int, tokens: int, steps: int) -> float:
    """A product of so many bf16 weights with all tokens, its weights read once a step: whichever of the two takes longer."""
    return max(2 * weights * tokens / FLOPS_PER_S, 2 * weights * steps / BYTES_PER_S)


def shared_prefixes(prompts: list, block: int = 32) -> tuple[list[int], int]:
    """How many first tokens each prompt shares with another one, in whole blocks, and how many such tokens there are."""
    chains = []
    count: dict[int, int] = {}
    for prompt in prompts:
        chain, chains_so_far = 0, []
        for start in range(0, len(prompt) - len(prompt) % block, block):
            chain = hash((chain, tuple(prompt[start : start + block])))
            count[chain] = count.get(chain, 0) + 1
            chains_so_far.append(chain)
        chains.append(chains_so_far)
    shared = [block * sum(count[chain] > 1 for chain in chain_of) for chain_of in chains]
    return shared, block * sum(many > 1 for many in count.values())
