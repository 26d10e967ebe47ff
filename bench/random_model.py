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
SHAPES: dict[str, dict[str, Any]] = {**workloads.MODELS, "tiny": TINY}


@contextmanager
def config_directory(shape: dict[str, Any]) -> Iterator[Path]:
    """A directory that holds nothing but the shape's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        yield Path(folder)


def random_engine(name: str, **options: Any) -> tuple[Engine, Parts, float]:
    """An engine for a shape, its parts, and the seconds that it took to be ready."""
    with config_directory(SHAPES[name]) as folder:
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
    engine: Engine, work: list[tuple[list[int], int]], tag: str, window: int | None = None
) -> float:
    """From the first request added to the last completion. ``window``: about how many may wait; None: all are known."""
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
            room = window - engine.stats().waiting
    seconds = time.perf_counter() - start
    gc.unfreeze()
    engine.check()
    return seconds
