"""A step of the device recorded as a CUDA graph."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """The device's time of one replay, after another one."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def record(step: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """The step as a graph, and what it returned: tensors that each replay writes anew, in the memory where they are now.

    A first, plain run lets every kernel compile and set itself up. pool: of a graph recorded before, to share its memory.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result
