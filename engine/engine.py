"""The engine: schedule a step, launch it, collect an earlier one."""

import time
from collections import deque
from collections.abc import Sequence as SequenceOf

from headrace.engine.build import Parts, build
from headrace.engine.config import EngineConfig
from headrace.engine.executor import StepHandle
from headrace.engine.grammars import Grammars
from headrace.engine.intake import new_sequence, refuse_duplicates
from headrace.engine.plan import StepPlan
from headrace.engine.request import EngineStats, ModelInfo, Request, StepOutput
from headrace.engine.scheduler import Scheduler

GRAMMAR_WAIT_S = 0.01
"""How long a step that has nothing to launch waits for a grammar to be compiled."""


class Engine:
    """Continuous batching in this process. ``poll`` steps as long as it may; nothing runs between calls.

    Raises ModelNotFound, UnsupportedModel, BadCheckpoint or OutOfMemory when it cannot be built.
    """

    def __init__(self, config: EngineConfig, parts: Parts | None = None) -> None:
        parts = parts or build(config)
        self.info: ModelInfo = parts.info
        self._executor = parts.executor
        self._scheduler: Scheduler = parts.scheduler
        self._grammars = parts.grammars or Grammars(parts.info)
        self._lag = parts.lag
        self._flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._arrivals = 0

    def add_many(self, requests: SequenceOf[Request]) -> None:
        """Queue requests; each ends in exactly one Completion. Raises InvalidRequest, and then takes none of them."""
        refuse_duplicates(requests, self._scheduler)
        sequences = [
            new_sequence(request, self.info, self._arrivals + i) for i, request in enumerate(requests)
        ]
        self._arrivals += len(sequences)
        self._grammars.prepare([seq for seq in sequences if seq.request.grammar is not None])
        for seq in sequences:
            self._scheduler.add(seq, held=seq.request.grammar is not None)

    def step(self) -> StepOutput:
        """Schedule, launch, collect. Tokens of a step may come ``lag`` calls later."""
        for seq, error in self._grammars.ready():
            self._scheduler.release(seq, error)
        plan = self._scheduler.schedule()
        if plan is not None:
            self._flight.append((plan, self._executor.submit(plan)))
        if self._flight and (plan is None or len(self._flight) > self._lag):
            plan, handle = self._flight.popleft()
            return self._scheduler.retire(plan, handle.tokens(), handle.logprobs(), handle.read())
        ended = self._scheduler.take_ended()
        if plan is None and not ended:
            self._grammars.wait(GRAMMAR_WAIT_S)
        return ended

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self._scheduler.has_work or bool(self._flight)

    def poll(self, timeout: float) -> StepOutput:
        """Step until something happened or the time is up; at once when there is nothing to do."""
        deadline = time.monotonic() + timeout
        while self.has_work:
            if (output := self.step()) or time.monotonic() >= deadline:
                return output
        return StepOutput()

    def finish(self, request_id: str, at_token: int) -> None:
        """Keep the first ``at_token`` generated tokens of a request and end it: its text is complete."""
        self._scheduler.finish(request_id, at_token)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored."""
        self._scheduler.abort(request_id)

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Assert the block pool's invariants; for tests and idle time."""
        self._scheduler.check()

    def close(self) -> None:
        """Forget every request and wait for what was launched."""
        while self._flight:
            self._flight.popleft()[1].tokens()
        self._grammars.close()
