"""Decode with and without CUDA graphs: tokens per second at small batches, where launches are the time.

    python bench/graphs.py --model qwen3-0.6b,llama3-8b --batch 1,8,64 --out bench/results/graphs.json

One engine a model, so that both sides have the same weights and memory. Prompts of 128 tokens; their prefill is not
timed. A step yields a token for each row, so tokens/s is batch x steps / seconds.
"""

import argparse
import gc
import time
from pathlib import Path

import numpy as np
import results_file
import torch
from random_model import random_engine, requests_of

from headrace.engine import Engine

PROMPT, WARM_STEPS = 128, 16


def tokens_per_s(engine: Engine, batch: int, steps: int, tag: str) -> float:
    """Of ``steps`` decode steps of ``batch`` rows, after the prefill and some steps more."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 1000, PROMPT).tolist() for _ in range(batch)]
    requests = requests_of([(prompt, steps + 2 * WARM_STEPS) for prompt in prompts], tag)
    engine.add_many(requests)
    for _ in range(WARM_STEPS):
        engine.step()
    before = engine.stats().generated_tokens
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - start
    assert engine.stats().generated_tokens - before == batch * steps, "a step did not decode every row"
    while engine.has_work:
        engine.step()
    return batch * steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b,llama3-8b")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    results = results_file.ResultsFile(args.out, args.commit, device=args.device)
    rows = []
    for model in args.model.split(","):
        engine, parts, ready = random_engine(model, device=args.device)
        graphs = parts.executor.graphs
        print(f"{model}: ready in {ready:.1f} s", flush=True)
        for batch in map(int, args.batch.split(",")):
            rate = {}
            for name, chosen in (("eager", None), ("graphs", graphs)):
                parts.executor.graphs = chosen
                tokens_per_s(engine, batch, WARM_STEPS, f"warm-{name}-{batch}")
                rate[name] = tokens_per_s(engine, batch, args.steps, f"{name}-{batch}")
            rows.append(
                {
                    "model": model, "batch": batch, "graphs_tokens_per_s": rate["graphs"],
                    "eager_tokens_per_s": rate["eager"], "ratio": rate["graphs"] / rate["eager"],
                }
            )  # fmt: skip
            results.append(rows[-1:])
        engine.close()
        del engine, parts, graphs, chosen
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    results_file.table(rows)


if __name__ == "__main__":
    main()
