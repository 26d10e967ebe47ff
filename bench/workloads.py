"""Offline workloads for the engine benchmark, the same token ids for every engine.

Prompts are token ids drawn below VOCAB from a seeded generator; output lengths are forced (no end-of-sequence stop), so
each engine does the same work. `build(name)` returns [(prompt_ids, output_len), ...].
"""

import numpy as np

VOCAB = 32_000


def _ids(rng, n):
    return rng.integers(10, VOCAB, size=int(n)).tolist()


def build(name: str, seed: int = 0) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(seed)
    out = []
    if name == "chat_shared":  # chat's requests behind one system prompt of 300, the same for every seed
        system = _ids(np.random.default_rng(300), 300)
        return [(system + prompt, length) for prompt, length in build("chat", seed)]
    if name == "chat":  # 2,000 requests, lognormal in (median 180) and out (median 180)
        for _ in range(2000):
            i = int(np.clip(rng.lognormal(np.log(180), 1.0), 4, 2048))
            o = int(np.clip(rng.lognormal(np.log(180), 0.9), 4, 1024))
            out.append((_ids(rng, i), o))
    elif (
        name == "extract"
    ):  # 2,048 requests: 2,048 shared + one of 16 groups of 512 + 128 of their own, 64 out
        base = _ids(rng, 2048)
        groups = [_ids(rng, 512) for _ in range(16)]
        for k in range(2048):
            out.append((base + groups[k % 16] + _ids(rng, 128), 64))
    elif name == "longdoc":  # 128 requests, 8,192 in, 128 out
        for _ in range(128):
            out.append((_ids(rng, 8192), 128))
    elif name == "decode":  # 512 requests, 128 in, 1,024 out
        for _ in range(512):
            out.append((_ids(rng, 128), 1024))
    else:
        raise KeyError(name)
    return out


# Model shapes; weights random, normal with deviation 0.02, in bf16.
MODELS = {
    "qwen3-0.6b": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        hidden_act="silu",
        attention_bias=False,
        torch_dtype="bfloat16",
    ),
    "llama3-8b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        torch_dtype="bfloat16",
    ),
}
