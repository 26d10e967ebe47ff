"""Requests that arrive through a window of waiting ones, as a worker feeds them, against all known at once.

    python bench/rolling.py --requests 8000 --windows 4096 --out bench/results/rolling.json

The chat workload drawn anew every 2,000 requests; the engine's own queue never holds more than the window.
"""

import argparse
from pathlib import Path

import results_file
import workloads
from random_model import random_engine, seconds_for


def chat(count: int) -> list[tuple[list[int], int]]:
    """``count`` requests of the chat workload, from as many seeds as that takes."""
    work: list[tuple[list[int], int]] = []
    while len(work) < count:
        work += workloads.build("chat", seed=len(work) // 2000)
    return work[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--windows", default="4096", help="comma separated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    work = chat(args.requests)
    tokens = sum(out for _, out in work)
    engine, _, ready = random_engine(args.model, device=args.device)
    print(
        f"{args.model}: ready in {ready:.1f} s; {len(work)} requests, {tokens:,} tokens to generate",
        flush=True,
    )
    seconds_for(engine, work[:8], "warm")
    rows = []
    for window in (None, *map(int, args.windows.split(","))):
        seconds = seconds_for(engine, work, f"window-{window}", window)
        rows.append(
            {
                "model": args.model, "requests": len(work), "window": window or "all", "seconds": seconds,
                "output_tokens_per_s": tokens / seconds,
                "loss_percent": 100 * (seconds / (rows[0]["seconds"] if rows else seconds) - 1),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
        results_file.write(args.out, rows[-1:], args.commit)
    results_file.table(rows)


if __name__ == "__main__":
    main()
