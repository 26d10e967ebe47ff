"""A scheduler, a symbolic executor and a lag between them."""

from collections import deque

import numpy as np
from symbolic_executor import SymbolicExecutor

from headrace.engine.request import Request, SamplingParams, StepOutput
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceStatus

VOCAB = 97


class Harness:
    """What Engine.step does, in a few lines; the invariants are checked after every step."""

    def __init__(
        self, *, num_blocks=64, block_size=4, max_slots=8, budget=16, lag=0, max_context=128, **options
    ):
        self.scheduler = Scheduler(
            num_blocks=num_blocks, block_size=block_size, max_slots=max_slots, max_context=max_context,
            max_batched_tokens=budget, **options,
        )  # fmt: skip
        self.executor = SymbolicExecutor(
            num_blocks, block_size, max_slots, -(-max_context // block_size), VOCAB
        )
        self.limit = min(max_context, num_blocks * block_size)
        self.lag = lag
        self.flight = deque()
        self.completions = {}
        self.streamed = {}
        self.sequences = {}
        self.arrivals = 0

    def add(
        self, request_id, prompt, max_tokens=8, priority=0, stop=(), stream=False, salt="", min_tokens=0,
        deadline=None,
    ):  # fmt: skip
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, stop_token_ids=tuple(stop), min_tokens=min_tokens
        )
        request = Request(
            request_id, prompt, params, priority=priority, stream=stream, salt=salt, deadline=deadline
        )
        self.arrivals += 1
        seq = Sequence(
            request=request,
            arrival=self.arrivals,
            limit=min(len(prompt) + max_tokens, self.limit),
            seed=0,
            added_at=0.0,
            tokens=np.array(prompt, np.int32),
            stop_ids=np.array(stop, np.int32),
        )
        self.sequences[request_id] = seq
        self.scheduler.add(seq)

    def step(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.flight.append((plan, self.executor.submit(plan)))
        output = StepOutput()
        if self.flight and (plan is None or len(self.flight) > self.lag):
            output = self.scheduler.retire(*self.flight.popleft())
        output.extend(self.scheduler.take_ended())
        for request_id, tokens in output.tokens:
            self.streamed.setdefault(request_id, []).extend(tokens)
        for completion in output.completions:
            assert completion.id not in self.completions, "a sequence ended twice"
            self.completions[completion.id] = completion
        self.scheduler.check()
        return plan

    def running(self):
        return {name for name, seq in self.sequences.items() if seq.status is SequenceStatus.RUNNING}

    def run(self, steps=5000):
        for _ in range(steps):
            if not self.scheduler.has_work and not self.flight:
                break
            self.step()
        assert not self.scheduler.has_work, "the scheduler is stuck"
        pool = self.scheduler.pool
        assert pool.live == 0
        assert pool.free + pool.cached == pool.num_blocks
        return self.completions
