"""The least time that a workload can take on the hardware: arithmetic and memory traffic, added up.

Each bf16 operation counts at 790 TFLOP/s, the weights once a step and each KV byte once a decode step at 4.3 TB/s, both
measured on an H200. It is an estimate, not a proof: the two could overlap.
"""

FLOPS_PER_S, BYTES_PER_S = 790e12, 4.3e12


def floor_seconds(shape: dict, requests: list) -> float:
    """The hardware's floor for a workload on this shape; an estimate that adds compute and memory up.

    A prefix that prompts share is computed once, and read once a decode step, however many rows share it.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * shape["intermediate_size"]
    head = hidden * shape["vocab_size"]
    shared, unique = shared_prefixes([prompt for prompt, _ in requests])
    own = [len(prompt) - common for (prompt, _), common in zip(requests, shared, strict=True)]
    steps = max(out for _, out in requests)
    tokens_in = sum(own) + unique
    tokens_out = sum(out for _, out in requests)
    matmul = 2 * layers * layer * (tokens_in + tokens_out) + 2 * head * tokens_out
    attention = sum(
        4 * layers * q * (common + length / 2) * length for common, length in zip(shared, own, strict=True)
    )
    contexts = unique * steps + sum(
        length * out + out * out / 2 for length, (_, out) in zip(own, requests, strict=True)
    )
    kv_bytes = contexts * layers * 2 * kv * 2
    weight_bytes = 2 * (layers * layer + head) * steps
    return (matmul + attention) / FLOPS_PER_S + (kv_bytes + weight_bytes) / BYTES_PER_S


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
