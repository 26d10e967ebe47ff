"""CUDA graphs without a GPU: a replay computes the step anew, from what is in its inputs then, into the memory it had."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.engine.executor import LocalExecutor, StepHandle
from headrace.engine.graphs import GraphCache
from headrace.engine.mixed_graphs import MixedGraphs
from headrace.engine.plan import StepPlan


class FakeGraph:
    """A recorded step, and where its results stand."""

    def __init__(
        self, step: Callable[[], Any], results: list[torch.Tensor], replays: list["FakeGraph"]
    ) -> None:
        self.step, self.results, self.replays = step, results, replays

    def replay(self) -> None:
        """Compute the step."""
        self.replays.append(self)
        for result, now in zip(self.results, _tensors(self.step()), strict=True):
            result.copy_(now)

    def pool(self) -> tuple[int, int]:
        """What stands for the memory pool."""
        return (0, 1)


class WithGraphs:
    """An executor that runs steps which fit as graphs, the others as ever. ``shared`` counts graphs of shared prefixes."""

    def __init__(self, inner: LocalExecutor, graphs: GraphCache | MixedGraphs) -> None:
        self.inner, self.graphs = inner, graphs
        self.shared = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step."""
        if not self.graphs.fits(plan):
            return self.inner.submit(plan)
        self.shared += len(plan.group_start) > 0
        return self.inner._handle(self.graphs.run(plan), None, plan)


def with_all_graphs(inner: LocalExecutor) -> WithGraphs:
    """The executor with all the graphs that an engine captures."""
    graphs = GraphCache(inner.runner)
    graphs.capture_all()
    return WithGraphs(inner, graphs)


@contextmanager
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGraph]]:
    """While open, steps are recorded so. Yields the graphs replayed, in order."""
    replays: list[FakeGraph] = []

    def record(step: Callable[[], Any], pool: Any) -> tuple[FakeGraph, Any]:
        results = step()
        held = [tensor.clone() for tensor in _tensors(results)]
        graph = FakeGraph(step, held, replays)
        return graph, held[0] if isinstance(results, torch.Tensor) else tuple(held)

    with monkeypatch.context() as patch:
        patch.setattr("headrace.engine.graphs.record", record)
        patch.setattr("headrace.engine.graphs.seconds_of", lambda graph: len(graph.results[0]))
        patch.setattr("headrace.engine.mixed_graphs.record", record)
        patch.setattr("headrace.engine.graphs.SHARED_BYTES", 0)  # what a tiny model's rows share is little
        yield replays


def _tensors(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)
