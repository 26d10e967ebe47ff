"""How the kernel benchmarks measure and report.

Calls are captured into one CUDA graph over inputs that together exceed the L2 cache, so that neither launches nor
cached inputs colour the figures; the median of several replays counts.
"""

import statistics
from collections.abc import Callable

import torch

COPY_BANDWIDTH = 4.3e12  # bytes/s, read plus written: a large device-to-device copy on an H200
MATRIX_RATE = 790e12  # FLOP/s: an 8192^3 bf16 product of random data on an H200
L2_BYTES = 60e6


def copies_for(num_bytes: float) -> int:
    """How many sets of inputs of a size it takes to leave nothing in the cache between calls."""
    return max(2, min(40, int(4 * L2_BYTES / num_bytes) + 1))


def seconds_per_call(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median seconds of one call, the calls run one after the other."""
    for call in calls[:1] * 2 + calls:
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


def report_bandwidth(what: str, num_bytes: float, seconds: float) -> None:
    """One line: microseconds, TB/s, share of the copy bandwidth."""
    rate = num_bytes / seconds
    print(
        f"{what:58s} {seconds * 1e6:9.1f} us {rate / 1e12:6.2f} TB/s {rate / COPY_BANDWIDTH:6.1%}", flush=True
    )


def report_rate(what: str, flops: float, seconds: float) -> None:
    """One line: microseconds, TFLOP/s, share of the matrix rate."""
    rate = flops / seconds
    print(
        f"{what:58s} {seconds * 1e6:9.1f} us {rate / 1e12:6.1f} TFLOP/s {rate / MATRIX_RATE:6.1%}", flush=True
    )
