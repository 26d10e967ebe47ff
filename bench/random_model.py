"""Engines with random weights for the benchmarks: a shape's config.json is all that they need."""

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import workloads

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.build import Parts, build

TINY = workloads.MODELS["qwen3-0.6b"] | dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=workloads.VOCAB, max_position_embeddings=4096,
)  # fmt: skip
_LLAMA_3_2 = workloads.MODELS["llama3-8b"] | dict(
    intermediate_size=8192, tie_word_embeddings=True,
    rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192),
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    **workloads.MODELS,
    "qwen3-4b": workloads.MODELS["qwen3-0.6b"] | dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    ),
    "qwen2.5-1.5b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768, rope_theta=1000000.0,
        rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act="silu", use_sliding_window=False, torch_dtype="bfloat16",
    ),
    "llama3.2-1b": _LLAMA_3_2 | dict(hidden_size=2048, num_hidden_layers=16, head_dim=64),
    "llama3.2-3b": _LLAMA_3_2 | dict(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24),
    "qwen1.5-1.8b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=2048, intermediate_size=5504, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=16, vocab_size=151936, max_position_embeddings=32768, rope_theta=1000000.0,
        rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu", use_sliding_window=False, torch_dtype="bfloat16",
    ),
    "qwen2.5-3b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768, rope_theta=1000000.0,
        rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act="silu", use_sliding_window=False, torch_dtype="bfloat16",
    ),
    "tiny": TINY,
}  # fmt: skip
"""Configs as published with the models, and one for the CPU."""


def shape_of(name: str) -> tuple[str, dict[str, Any]]:
    """What to call a model, and its config: of a name in SHAPES, a directory with config.json, or such a file's path."""
    if name in SHAPES:
        return name, SHAPES[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise SystemExit(
            f"--model {name}: neither a directory with config.json, nor such a file, nor one of {', '.join(SHAPES)}"
        )
    shape = json.loads(path.read_text())
    if shape["vocab_size"] < workloads.VOCAB:
        raise SystemExit(
            f"--model {name}: the workloads' tokens need a vocabulary of {workloads.VOCAB}, it has {shape['vocab_size']}"
        )
    return path.resolve().parent.name, shape


@contextmanager
def config_directory(shape: dict[str, Any]) -> Iterator[Path]:
    """A directory that holds nothing but the shape's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        yield Path(folder)


def random_engine(name: str, **options: Any) -> tuple[Engine, Parts, float]:
    """An engine for a model that shape_of knows, its parts, and the seconds that it took to be ready."""
    with config_directory(shape_of(name)[1]) as folder:
        start = time.perf_counter()
        config = EngineConfig(model=str(folder), weights="random", **options)
        parts = build(config)
        return Engine(config, parts), parts, time.perf_counter() - start


def requests_of(work: list[tuple[list[int], int]], tag: str) -> list[Request]:
    """Sampled at temperature 1, lengths forced. The tag is a salt too: it keeps one run's cache from the next."""
    return [
        Request(f"{tag}-{i}", np.array(prompt, np.int32), SamplingParams(temperature=1.0, max_tokens=out, ignore_eos=True, seed=i), salt=tag)
        for i, (prompt, out) in enumerate(work)
    ]  # fmt: skip


def seconds_for(
    engine: Engine,
    work: list[tuple[list[int], int]],
    tag: str,
    window: int | None = None,
    *,
    running_count: bool = False,
) -> float:
    """From the first request added to the last completion.

    ``window``: about how many may wait, or, where running ones count, how many may be in the engine; None: all are known.
    """
    pending = list(reversed(requests_of(work, tag)))
    room = len(pending) if window is None else window
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    while pending or engine.has_work:
        if pending and room > 0:
            engine.add_many([pending.pop() for _ in range(min(room, len(pending)))])
        engine.step()
        if pending and window is not None:
            stats = engine.stats()
            room = window - stats.waiting - (stats.running if running_count else 0)
    seconds = time.perf_counter() - start
    gc.unfreeze()
    engine.check()
    return seconds
