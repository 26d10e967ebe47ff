"""Between the scheduler's plans and the device: submit a step, look at its tokens later."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.plan import StepPlan
from headrace.engine.runner import ModelRunner


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> NDArray[np.int64]:
        """[K] sampled tokens in the order of the plan's sample rows; waits for the step."""


class Executor(Protocol):
    """Runs steps in the order submitted. ``submit`` returns before the step is done where the device allows."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step."""


@dataclass(frozen=True, slots=True)
class _Handle:
    host: Tensor
    done: torch.cuda.Event | None

    def tokens(self) -> NDArray[np.int64]:
        if self.done is not None:
            self.done.synchronize()
        tokens: NDArray[np.int64] = self.host.numpy()
        return tokens


class LocalExecutor:
    """One device, driven from this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step; on the CPU it has run when this returns."""
        tokens = self.runner.run(plan)
        if tokens.device.type == "cpu":
            return _Handle(tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _Handle(host, done)
