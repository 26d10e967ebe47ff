"""What sampling options cost: the same workload plain, and with an option on every row.

    python bench/options.py --model qwen3-0.6b --workload chat --reps 2 --out bench/results/options.json

Runs on CUDA, or with --device cpu --model tiny --limit 50 to see that it works. The kinds take turns, so that a change of the
machine's speed meets all of them alike.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import results_file
import workloads
from random_model import SHAPES, random_engine, requests_of

from headrace.engine import Engine, Request

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "top_p and penalties": {"top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "bad_words": {"bad_words": ((5,), (6, 7), (8, 9, 10))},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
}  # fmt: skip


def with_options(work: list, tag: str, options: dict[str, Any]) -> list[Request]:
    """The workload's requests, each with these options."""
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **options))
        for request in requests_of(work, tag)
    ]


def seconds(engine: Engine, requests: list[Request]) -> float:
    """From the first request added to the last completion."""
    start = time.perf_counter()
    engine.add_many(requests)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def main() -> None:
    """Print a table: tokens a second of each kind, and its share of plain."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--workload", default="chat", help="chat, extract, longdoc or decode")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only the first requests of the workload")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    args = parser.parse_args()
    engine, _, _ = random_engine(args.model, device=args.device)
    work = workloads.build(args.workload)[: args.limit]
    tokens = sum(out for _, out in work)
    seconds(engine, requests_of(work[:64], "warm"))
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for rep in range(args.reps):
        for kind, options in KINDS.items():
            taken[kind].append(seconds(engine, with_options(work, f"{kind}-{rep}", options)))
    plain = statistics.median(taken["plain"])
    rows = [
        {
            "model": args.model,
            "workload": args.workload,
            "options": kind,
            "seconds": statistics.median(times),
            "output_tokens_per_s": tokens / statistics.median(times),
            "share_of_plain": plain / statistics.median(times),
        }
        for kind, times in taken.items()
    ]
    for row in rows:
        print(
            f"{row['options']:<22}{row['output_tokens_per_s']:>12,.0f} out/s{row['share_of_plain']:>8.3f} of plain"
        )
    results_file.write(args.out, rows, args.commit, options={"device": args.device, "limit": args.limit})


if __name__ == "__main__":
    main()
