"""Small steps with a prompt in each, with and without CUDA graphs of them.

    python bench/mixed_steps.py --model qwen3-0.6b --out bench/results/mixed_steps.json

A case is ROWSxPROMPT: a request of PROMPT tokens arrives before each step and is answered in ROWS tokens, so that about as
many rows decode beside one prompt. One engine for all; both sides take turns. Milliseconds a step, the median of its turns.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import results_file
from random_model import random_engine, requests_of

from headrace.engine import Engine
from headrace.engine.mixed_graphs import MixedGraphs
from headrace.engine.plan import StepPlan

CASES = "15x64,60x64,60x250,120x500,250x60,250x250,500x500"
TURNS = 3


def ms_per_step(engine: Engine, rows: int, prompt: int, steps: int, tag: str) -> float:
    """Of ``steps`` steps, after as many as it takes for the first answers to end."""
    rng = np.random.default_rng(0)
    arrivals = [(rng.integers(10, 1000, prompt).tolist(), rows) for _ in range(rows + steps)]
    start = 0.0
    for number, request in enumerate(requests_of(arrivals, tag)):
        if number == rows:
            start = time.perf_counter()
        engine.add_many([request])
        engine.step()
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return 1e3 * seconds / steps


def never(plan: StepPlan) -> bool:
    """In place of ``MixedGraphs.fits``: mixed steps go without."""
    return False


def main() -> None:
    """Print a table: cases, milliseconds a step, and how many steps were graphs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    results = results_file.ResultsFile(args.out, args.commit, device=args.device)
    engine, parts, ready = random_engine(args.model, device=args.device)
    print(f"{args.model}: ready in {ready:.1f} s", flush=True)
    graphs = parts.executor.graphs
    rows = []
    for case in args.cases.split(","):
        decodes, prompt = map(int, case.split("x"))
        times: dict[str, list[float]] = {"eager": [], "graphs": []}
        replays = 0
        for turn in range(TURNS + 1):  # the first warms up
            for side in times:
                if graphs:
                    replays = graphs.replays
                    graphs.mixed.fits = MixedGraphs.fits.__get__(graphs.mixed) if side == "graphs" else never
                ms = ms_per_step(engine, decodes, prompt, args.steps, f"{case}-{side}-{turn}")
                if turn:
                    times[side].append(ms)
        eager, replayed = (statistics.median(times[side]) for side in ("eager", "graphs"))
        rows.append(
            {
                "model": args.model, "case": case, "eager_ms": eager, "graphs_ms": replayed, "ratio": eager / replayed,
                "replays": graphs.replays - replays if graphs else 0,
            }
        )  # fmt: skip
        results.append(rows[-1:])
    results_file.table(rows)
    engine.close()


if __name__ == "__main__":
    main()
