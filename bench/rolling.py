"""Requests that arrive through a window of waiting ones, as a worker feeds them, against all known at once.

    python bench/rolling.py --requests 8000 --windows 4096,256 --out bench/results/rolling.json
    python bench/rolling.py --workload chat_shared --requests 2000 --windows 256,64 --running-count

The workload drawn anew every 2,000 requests; the engine's own queue never holds more than the window, or with
--running-count, the engine itself.
"""

import argparse
from pathlib import Path

import results_file
import workloads
from random_model import random_engine, seconds_for, shape_of


def drawn(workload: str, count: int, seed: int) -> list[tuple[list[int], int]]:
    """``count`` requests of a chat workload, from as many seeds as that takes, beginning with ``seed``."""
    work: list[tuple[list[int], int]] = []
    while len(work) < count:
        work += workloads.build(workload, seed + len(work) // 2000)
    return work[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="as bench/engine.py's")
    parser.add_argument("--workload", default="chat", choices=["chat", "chat_shared"])
    parser.add_argument("--seed", type=int, default=0, help="of the first 2,000 requests")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--windows", default="4096", help="comma separated")
    parser.add_argument("--running-count", action="store_true", help="a window holds running requests too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    results = results_file.ResultsFile(args.out, args.commit, device=args.device)
    model, _ = shape_of(args.model)
    work = drawn(args.workload, args.requests, args.seed)
    tokens = sum(out for _, out in work)
    engine, _, ready = random_engine(args.model, device=args.device)
    print(
        f"{model}: ready in {ready:.1f} s; {len(work)} requests, {tokens:,} tokens to generate",
        flush=True,
    )
    seconds_for(engine, work[:8], "warm")
    rows = []
    for window in (None, *map(int, args.windows.split(","))):
        seconds = seconds_for(engine, work, f"window-{window}", window, running_count=args.running_count)
        rows.append(
            {
                "model": model, "workload": args.workload, "seed": args.seed, "requests": len(work), "window": window or "all",
                "running_count": args.running_count, "seconds": seconds,
                "output_tokens_per_s": tokens / seconds,
                "loss_percent": 100 * (seconds / (rows[0]["seconds"] if rows else seconds) - 1),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
        results.append(rows[-1:])
    results_file.table(rows)


if __name__ == "__main__":
    main()
