"""The host's time in a step, without a device: a workload through the engine, with an executor that answers at once.

    OMP_NUM_THREADS=1 python bench/host.py --model qwen3-0.6b --workload extract,chat,decode --windows all,1024

Slots, KV blocks and tokens a step are those of one H200. CPU time of the thread, without what launches take. The digest is
of all plans: it stays the same where a change is not to change what the engine does.
"""

import argparse
import dataclasses
import gc
import hashlib
import time
from collections import defaultdict
from typing import Any

import numpy as np
import results_file
import rolling
import workloads
from random_model import requests_of

from headrace.engine import Engine, EngineConfig
from headrace.engine.block_pool import BlockPool
from headrace.engine.build import CUDA_BATCHED_TOKENS, CUDA_SLOTS, Parts
from headrace.engine.layout import StepLayout
from headrace.engine.plan import StepPlan
from headrace.engine.prefix_tree import PrefixTree
from headrace.engine.request import ModelInfo
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.sharers import Sharers
from headrace.engine.slots import Slots
from headrace.engine.waiting import WaitingQueue

KV_TOKENS = {"qwen3-0.6b": 1_130_000, "llama3-8b": 830_000}
BLOCK_SIZE = 32
PHASES = {
    "add": [(Engine, "add_many")],
    "queue": [(WaitingQueue, "head"), (WaitingQueue, "pop"), (WaitingQueue, "push")],
    "match": [(PrefixTree, "match")],
    "insert": [(PrefixTree, "insert")],
    "blocks": [(BlockPool, "take"), (BlockPool, "share"), (BlockPool, "release")],
    "seat": [(Slots, "seat"), (Slots, "vacate")],
    "group": [(Sharers, "group")],
    "layout": [(StepLayout, "plan")],
    "schedule": [(Scheduler, "schedule")],
    "retire": [(Scheduler, "retire")],
    "completion": [(Sequence, "completion")],
}


class Phases:
    """CPU seconds of each phase, less those of the phases inside it. Measuring costs about a microsecond a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watch(self) -> None:
        """Time every call of what ``PHASES`` names from now on."""
        for phase, methods in PHASES.items():
            for owner, name in methods:
                setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def _timed(self, phase: str, method: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            self._inner.append(0.0)
            try:
                return method(*args, **options)
            finally:
                took = time.thread_time() - start
                self.seconds[phase] += took - self._inner.pop()
                self._inner[-1] += took

        return timed


class AtOnce:
    """An executor whose steps are done when they are submitted; every token is 0."""

    def __init__(self) -> None:
        self.seen = hashlib.blake2b(digest_size=8)
        self.seconds = 0.0
        self.rows, self.prefills = 0, 0

    def submit(self, plan: StepPlan) -> "_Answered":
        """Look at the plan, and note the time that this takes."""
        start = time.thread_time()
        _digest(self.seen, plan)
        self.rows, self.prefills = len(plan.slots), len(plan.slots) - plan.num_decodes
        self.seconds += time.thread_time() - start
        return _Answered(len(plan.sample_rows))


@dataclasses.dataclass(frozen=True)
class _Answered:
    count: int

    def tokens(self) -> np.ndarray:
        return np.zeros(self.count, np.int64)

    def logprobs(self) -> None:
        return None

    def read(self) -> None:
        return None


def _digest(seen: Any, part: Any) -> None:
    if dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            _digest(seen, getattr(part, field.name))
    else:
        seen.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())


def engine_of(model: str) -> tuple[Engine, AtOnce]:
    """An engine of a model's shape and a card's size that computes nothing."""
    shape, executor = workloads.MODELS[model], AtOnce()
    context = shape["max_position_embeddings"]
    scheduler = Scheduler(
        num_blocks=KV_TOKENS[model] // BLOCK_SIZE, block_size=BLOCK_SIZE, max_slots=CUDA_SLOTS, max_context=context,
        max_batched_tokens=CUDA_BATCHED_TOKENS,
    )  # fmt: skip
    info = ModelInfo("none", shape["vocab_size"], context, CUDA_SLOTS, None, (2,))
    return Engine(EngineConfig(model=model), Parts(info, scheduler, executor, lag=1)), executor


def measure(model: str, work: list[tuple[list[int], int]], window: int | None) -> dict[str, Any]:
    """Feed the work through a window of waiting requests (None: all at once); milliseconds by kind of step."""
    engine, executor = engine_of(model)
    pending = list(reversed(requests_of(work, "run")))
    room = len(pending) if window is None else window
    gc.collect()
    gc.freeze()
    took: dict[str, list[float]] = {"add": [], "mixed": [], "few": [], "decode": []}
    while pending or engine.has_work:
        start = time.thread_time()
        if pending and room > 0:
            engine.add_many([pending.pop() for _ in range(min(room, len(pending)))])
            took["add"].append(time.thread_time() - start)
        executor.seconds, start = 0.0, time.thread_time()
        engine.step()
        kind = "decode" if not executor.prefills else "few" if executor.rows < 400 else "mixed"
        took[kind].append(time.thread_time() - start - executor.seconds)
        if window is not None:
            room = window - engine.stats().waiting
    gc.unfreeze()
    engine.check()
    steps = took["mixed"] + took["few"] + took["decode"]
    return {
        "seconds": sum(steps) + sum(took["add"]),
        "steps": len(steps),
        "add_ms": 1e3 * sum(took["add"]),
        "mixed_ms": _mean_ms(took["mixed"] + took["few"]),
        "mixed_few_rows_ms": _mean_ms(took["few"]),
        "decode_ms": _mean_ms(took["decode"]),
        "max_ms": 1e3 * max(steps),
        "digest": executor.seen.hexdigest(),
    }


def _mean_ms(seconds: list[float]) -> float:
    return 1e3 * float(np.mean(seconds or [0.0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="comma separated")
    parser.add_argument(
        "--workload", default="extract", help="chat, extract, longdoc, decode; comma separated"
    )
    parser.add_argument(
        "--windows",
        default="all",
        help="how many requests may wait, comma separated; chat is four times as long then",
    )
    parser.add_argument(
        "--phases", action="store_true", help="also by phase (the watching costs time itself)"
    )
    args = parser.parse_args()
    phases = Phases()
    if args.phases:
        phases.watch()
    rows = []
    for model in args.model.split(","):
        for name in args.workload.split(","):
            for window in args.windows.split(","):
                rolls = window != "all" and name == "chat"
                work = rolling.drawn("chat", 8000, 0) if rolls else workloads.build(name)
                phases.seconds.clear()
                row = measure(model, work, None if window == "all" else int(window))
                rows.append({"model": model, "workload": name, "window": window, **row})
                if args.phases:
                    steps = row["steps"]
                    print(
                        rows[-1]
                        | {"ms a step": {k: round(1e3 * v / steps, 3) for k, v in phases.seconds.items()}}
                    )
    results_file.table(rows)


if __name__ == "__main__":
    main()
