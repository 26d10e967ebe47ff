"""How the kernel benchmarks measure and report.

Calls are captured into one CUDA graph over inputs that together exceed the L2 cache, so that neither launches nor
cached inputs colour the figures; the median of several replays counts. Without a GPU, under TRITON_INTERPRET=1, each script
runs its TINY case to show that it works: its figures then say nothing.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

COPY_BANDWIDTH = 4.3e12  # bytes/s, read plus written: a large device-to-device copy on an H200
MATRIX_RATE = 790e12  # FLOP/s: an 8192^3 bf16 product of random data on an H200
L2_BYTES = 60e6

Case = TypeVar("Case")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

rows: list[dict[str, Any]] = []
"""What was reported so far, for whoever keeps it (all.py)."""


def cases_for(cases: Sequence[Case], tiny: Case) -> Sequence[Case]:
    """The cases on a GPU; a tiny one in the interpreter, which is a thousand times slower."""
    return cases if ON_GPU else [tiny]


def main_or_sweep(
    main: Callable[[], None],
    report_case: Callable[[Case, str], None],
    cases: Sequence[Case],
    kernel: ModuleType,
    tiles: Sequence[tuple],
) -> None:
    """Run ``main``, or with ``--sweep N`` the first N cases with each of ``tiles`` instead of the kernel's own.

    report_case: measures a case and reports it, with its second argument behind the shape.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", type=int, default=0, help="try many tiles on the first N cases")
    swept = parser.parse_args().sweep
    if not swept:
        main()
    for case, tile in itertools.product(cases[:swept], tiles):
        kernel._tile = lambda *_, tile=tile: tile
        try:
            report_case(case, f" {tuple(tile)}")
        except Exception as error:  # not every tile fits
            print(f"{case} {tuple(tile)}: {type(error).__name__}", flush=True)


def copies_for(num_bytes: float) -> int:
    """How many sets of inputs of a size it takes to leave nothing in the cache between calls."""
    return max(2, min(40, int(4 * L2_BYTES / num_bytes) + 1)) if ON_GPU else 1


def seconds_per_call(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Median seconds of one call, the calls run one after the other."""
    if not ON_GPU:
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls)
    for call in [calls[0], calls[0], *calls]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def report_bandwidth(kernel: str, shape: str, num_bytes: float, seconds: float) -> None:
    """One line: microseconds, TB/s, share of the copy bandwidth."""
    _report(kernel, shape, seconds, "TB/s", num_bytes / seconds, COPY_BANDWIDTH)


def report_rate(kernel: str, shape: str, flops: float, seconds: float) -> None:
    """One line: microseconds, TFLOP/s, share of the matrix rate."""
    _report(kernel, shape, seconds, "TFLOP/s", flops / seconds, MATRIX_RATE)


def _report(kernel: str, shape: str, seconds: float, unit: str, rate: float, ceiling: float) -> None:
    row = {"kernel": kernel, "shape": shape, "us": seconds * 1e6, unit: rate / 1e12, "share": rate / ceiling}
    rows.append(row)
    print(
        f"{kernel + ' ' + shape:62s} {row['us']:9.1f} us {row[unit]:7.2f} {unit:8s}{row['share']:6.1%}",
        flush=True,
    )
