"""Decode steps whole, and in parts side by side: is there anything to be gained by one part's attention beside another's products?

    python bench/halves.py --model qwen3-0.6b --cases 512x640,1536x450

A case is ROWSxKEYS: so many rows of 40% to 160% of so many keys. A step's forward is captured as a graph, whole, and in parts
as branches of one graph. "parts 1:1" are two equal ones on streams of one priority; "first" lets products pass attention, each
part's attention being on a stream of its own, and "last" the other way round. Milliseconds of a replay, the median of turns.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import results_file
import torch
from random_model import random_engine
from torch import Tensor

from headrace.engine import kv_cache
from headrace.engine.capture import record
from headrace.engine.runner import ModelRunner, StepShape

FIRST, LAST = -5, 0  # priorities of streams
WAYS: dict[str, tuple[list[int], int, int | None]] = {
    # the parts' sizes, the priority of products, that of attention on a stream of its own
    "whole": ([1], LAST, None),
    "parts 1:1": ([1, 1], LAST, None),
    "parts 1:1, products first": ([1, 1], FIRST, LAST),
    "parts 1:1, products last": ([1, 1], LAST, FIRST),
    "parts 2:3, products first": ([2, 3], FIRST, LAST),
    "parts 1:1:1, products first": ([1, 1, 1], FIRST, LAST),
    "parts 1:1:1:1, products first": ([1, 1, 1, 1], FIRST, LAST),
}

attention_streams: dict[int, torch.cuda.Stream] = {}
"""The stream on which attention runs that is called for on another one."""

decode_attention = kv_cache.decode_attention


def attention_on_its_stream(*args: object, **options: object) -> Tensor:
    """In place of decode_attention."""
    current = torch.cuda.current_stream()
    own = attention_streams.get(current.cuda_stream)
    if own is None:
        return decode_attention(*args, **options)
    own.wait_stream(current)
    with torch.cuda.stream(own):
        out = decode_attention(*args, **options)
    current.wait_stream(own)
    return out


class Rows:
    """A batch that decodes, its keys anywhere in the cache."""

    def __init__(self, runner: ModelRunner, count: int, keys: int) -> None:
        rng = np.random.default_rng(0)
        lens = rng.integers(int(keys * 0.4), int(keys * 1.6), count)
        pages = -(-lens // runner.kv.block_size)
        if pages.sum() > runner.kv.num_blocks or count > runner.max_slots:
            raise SystemExit(f"--cases {count}x{keys}: more than the cache or the slot table holds")
        blocks, table = rng.permutation(pages.sum()), np.zeros(runner.block_tables.shape, np.int32)
        for row, end in enumerate(pages.cumsum()):
            table[row, : pages[row]] = blocks[end - pages[row] : end]
        runner.block_tables.copy_(torch.from_numpy(table))
        self.runner, self.count = runner, count
        self.query_start = torch.arange(count + 1, dtype=torch.int32, device=runner.device)
        self.ids, self.slots, self.starts, self.lens = (
            torch.from_numpy(values.astype(np.int32)).to(runner.device)
            for values in (rng.integers(0, 1000, count), np.arange(count), lens - 1, lens)
        )

    def forward(self, first: int, end: int) -> Tensor:
        part = slice(first, end)
        shape = StepShape(end - first, self.runner.max_context)
        return self.runner.forward(
            self.ids[part], self.query_start[: end - first + 1], self.slots[part], self.starts[part], self.lens[part],
            shape, None,
        )  # fmt: skip

    def step(self, sizes: Sequence[int], products: int, attention: int | None) -> Callable[[], Tensor]:
        """A step in parts of these relative sizes, on streams of these priorities."""
        edges = [self.count * sum(sizes[:i]) // sum(sizes) for i in range(len(sizes) + 1)]
        if len(sizes) == 1:
            return lambda: self.forward(0, self.count)
        streams = [torch.cuda.Stream(priority=products) for _ in sizes]
        if attention is not None:
            attention_streams.update(
                {stream.cuda_stream: torch.cuda.Stream(priority=attention) for stream in streams}
            )

        def in_parts() -> Tensor:
            main, parts = torch.cuda.current_stream(), []
            for stream, (first, end) in zip(streams, pairwise(edges), strict=True):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    parts.append(self.forward(first, end))
            for stream in streams:
                main.wait_stream(stream)
            return torch.cat(parts)

        return in_parts


def milliseconds(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Of a replay, over so many seconds of them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replays = 3
    for _ in range(2):  # the first tells how many it takes
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        each = begin.elapsed_time(end) / replays
        replays = max(3, int(1e3 * seconds / each))
    return each


@torch.inference_mode()
def main() -> None:
    """Print a row a case and way, and keep them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--cases", default="128x900,256x600,512x640,512x1100,1000x500,1536x450")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of a turn; longer ones reach the power limit"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    args = parser.parse_args()
    results = results_file.ResultsFile(args.out, args.commit, seconds=args.seconds, turns=args.turns)
    _, parts, _ = random_engine(args.model, cuda_graphs=False)
    kv_cache.decode_attention = attention_on_its_stream
    told = []
    for case in args.cases.split(","):
        rows = Rows(parts.executor.runner, *map(int, case.split("x")))
        graphs = {name: record(rows.step(*way), None)[0] for name, way in WAYS.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(args.turns):
            for name, graph in graphs.items():
                times[name].append(milliseconds(graph, args.seconds))
        whole = statistics.median(times["whole"])
        for name in graphs:
            ms = statistics.median(times[name])
            told.append({"model": args.model, "case": case, "way": name, "ms": ms, "of whole": ms / whole})
        results.append(told[-len(graphs) :])
        attention_streams.clear()
        del graphs
    results_file.table(told)


if __name__ == "__main__":
    main()
