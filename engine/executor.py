"""Between the scheduler's plans and the device: submit a step, look at its tokens later."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.graphs import GraphCache
from headrace.engine.guide import GuidedRow
from headrace.engine.masks import Masks
from headrace.engine.plan import StepPlan
from headrace.engine.prompt_reading import Read
from headrace.engine.readings import ReadOff
from headrace.engine.runner import ModelRunner, Sampled


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> NDArray[np.int64]:
        """[K] sampled tokens in the order of the plan's sample rows, as in ``Sampled``; waits for the step."""

    def logprobs(self) -> NDArray[np.int32] | None:
        """What the plan's logprob rows asked for, packed as in ``Sampled``; waits for the step."""

    def read(self) -> ReadOff | None:
        """What the plan's readings asked for, if anything; waits for the step."""


class Executor(Protocol):
    """Runs steps in the order submitted. ``submit`` returns before the step is done where the device allows."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When a step ran, for traces: seconds on the host's clock, and events around it on the device's."""

    number: int
    rows: int
    tokens: int
    graph: bool
    submitted_at: float
    launched_at: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


@dataclass(slots=True)
class _Handle:
    """guided: rows whose guides have not taken in their tokens yet."""

    host: Sampled
    done: torch.cuda.Event | None
    masks: Masks
    guided: Sequence[GuidedRow]

    def tokens(self) -> NDArray[np.int64]:
        if self.done is not None:
            self.done.synchronize()
        tokens: NDArray[np.int64] = self.host.tokens.numpy()
        if self.guided:
            self.masks.take(self.guided, tokens)
            self.guided = ()
        return tokens

    def logprobs(self) -> NDArray[np.int32] | None:
        if self.done is not None:
            self.done.synchronize()
        packed = self.host.logprobs
        return None if packed is None else packed.numpy()

    def read(self) -> ReadOff | None:
        if self.done is not None:
            self.done.synchronize()
        read = self.host.read
        return None if read is None else ReadOff(read.lines.numpy(), read.sums.numpy())


class LocalExecutor:
    """One device, driven from this process. ``timings``, where set to a list, collects one StepTiming a step (CUDA).

    A step's masks depend on the tokens of the step before. They are waited for when its forward has been launched and
    nothing but sampling is left to launch; until then the host is as far ahead of the device as without masks.
    """

    def __init__(self, runner: ModelRunner, graphs: GraphCache | None = None) -> None:
        self.runner = runner
        self.graphs = graphs
        self.timings: list[StepTiming] | None = None

    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step; on the CPU it has run when this returns."""
        if self.runner.device.type == "cpu":
            return self._handle(self.runner.run(plan), None, plan)
        begin, submitted_at = _event(self.timings is not None), time.perf_counter()
        graph = self.graphs is not None and self.graphs.fits(plan)
        sampled = self.graphs.run(plan) if self.graphs is not None and graph else self.runner.run(plan)
        logprobs = None if sampled.logprobs is None else _to_host(sampled.logprobs)
        read = sampled.read and Read(_to_host(sampled.read.lines), _to_host(sampled.read.sums))
        host = Sampled(_to_host(sampled.tokens), logprobs, read)
        end = _event(self.timings is not None)
        if self.timings is not None:
            launched_at = time.perf_counter()
            self.timings.append(
                StepTiming(
                    plan.number,
                    len(plan.slots),
                    plan.num_tokens,
                    graph,
                    submitted_at,
                    launched_at,
                    begin,
                    end,
                )
            )
        return self._handle(host, end, plan)

    def _handle(self, host: Sampled, done: torch.cuda.Event | None, plan: StepPlan) -> _Handle:
        handle = _Handle(host, done, self.runner.masks, plan.guided)
        if plan.guided:
            self.runner.masks.launched.append(handle.tokens)
        return handle


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _event(timed: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event
