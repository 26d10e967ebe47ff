"""One process of bench/pipeline.py: a worker whose engine answers at once, or a recorder. Loads no torch.

    python bench/pipeline_process.py '{"role": "worker", ...}'

Says ``ready`` when everything is imported, begins at a line on its standard input, ends at SIGTERM, and then prints one
line of JSON: its threads' CPU seconds by name, and those of its stages where it was asked for them.
"""

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.cli.interpreter import collect_seldom, take_short_turns
from headrace.engine.answers import TextChoice
from headrace.engine.request import EngineStats, FinishReason
from headrace.engine.text_engine import TextCompletion, TextRequest
from headrace.ledger import Ledger, finish, ledger, record, staging
from headrace.ledger.recorder import Recorder
from headrace.schemas import Topics
from headrace.worker import Worker, WorkerConfig, attempts, default_tiers, outcomes, publisher, worker
from headrace.worker.admission import Admission
from headrace.worker.attempts import Attempts
from headrace.worker.consumer import TierConsumer
from headrace.worker.held import Held
from headrace.worker.metrics import Metrics

TICKS = 100  # a second, in /proc


class AtOnce:
    """A TextEngine that answers everything at the next poll, so that what is measured is all but the engine."""

    model = "stand-in"
    max_context = 4096
    max_slots = 64

    def __init__(self, answer: str) -> None:
        self._choices = [TextChoice(0, answer, list(range(64)), FinishReason.STOP, None)]
        self._ended: list[TextCompletion] = []

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        self._ended += [
            TextCompletion(request.id, self._choices, 160, 32, 64, 0, 0.001, 0.02, 0.5)
            for request in requests
        ]

    def poll(self, timeout: float) -> list[TextCompletion]:
        if not self._ended:
            time.sleep(timeout)
        ended, self._ended = self._ended, []
        return ended

    def abort(self, ids: Sequence[str]) -> None:
        """Nothing runs for long enough."""

    def stats(self) -> EngineStats:
        return EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))

    def close(self) -> None:
        """Nothing to let go."""


# --- CPU seconds by stage -------------------------------------------------------------------------------------------


# What is timed: where a function is looked up, its name there, and the stage. A stage inside another counts for itself
# alone, so they add up.
STAGES: tuple[tuple[Any, str, str], ...] = (
    (TierConsumer, "_receive", "receive"),
    (TierConsumer, "_note_released", "commit"),
    (TierConsumer, "_commit", "commit"),
    (worker, "read", "parse"),
    (Held, "take", "hold"),
    (Held, "forget", "release"),
    (ledger, "lookup", "lookup"),
    (Worker, "_settle", "settle"),
    (Admission, "put", "admission"),
    (Admission, "take", "admission"),
    (Attempts, "begin", "attempt: row"),
    (ledger, "begin", "attempt: write"),
    (attempts, "to_request", "translate in"),
    (outcomes.translate, "succeeded", "translate out"),
    (outcomes, "outcome", "encode"),
    (ledger, "finish", "finish: write"),
    (finish, "_values", "finish: rows"),
    (ledger, "record", "record: write"),
    (record, "job_values", "record: rows"),
    (staging, "stage", "copy"),
    (outcomes, "result_record", "publish"),
    (publisher.Publisher, "_send", "publish"),
    (publisher.Publisher, "_delivered", "publish"),
    (Metrics, "started", "metrics"),
    (Metrics, "answered", "metrics"),
    (Metrics, "ended", "metrics"),
    (Recorder, "_read", "parse"),
)


class Stages:
    """Adds up the CPU time of functions, each for itself: without the others that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = threading.local()

    def watch(self) -> None:
        """Put a clock around each stage. It costs about a microsecond a call."""
        for place, name, stage in STAGES:
            setattr(place, name, self._timed(getattr(place, name), stage))

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        inside, seconds, clock = self._inside, self.seconds, time.thread_time

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(inside, "nested", 0.0)
            inside.nested = 0.0
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - began
                seconds[stage] += took - inside.nested
                inside.nested = outer + took

        return timed


def threads() -> dict[str, float]:
    """CPU seconds of this process's threads, those of one name together."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            comm, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        name = names.get(int(task.name)) or comm.rstrip("0123456789/")
        user, system = fields.split()[11:13]
        seconds[name] += (int(user) + int(system)) / TICKS
    return dict(seconds)


def main() -> None:
    told = json.loads(sys.argv[1])
    stop, stages = threading.Event(), Stages()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if told["stages"]:
        stages.watch()
    collect_seldom()
    if told["role"] == "recorder":
        take_short_turns()
    print("ready", flush=True)
    sys.stdin.readline()
    before = threads()
    topics = Topics(prefix=told["prefix"])
    ended = threading.Event()
    at_end: dict[str, float] = {}
    threading.Thread(target=lambda: (stop.wait(), at_end.update(threads()), ended.set()), daemon=True).start()
    with Ledger(told["database_url"]) as table:
        if told["role"] == "recorder":
            Recorder(told["bootstrap"], topics, table).run(stop)
        else:
            tiers = tuple(replace(tier, prefetch=told["prefetch"]) for tier in default_tiers(topics.tiers))
            config = WorkerConfig(told["bootstrap"], topics, tiers, max_in_flight=told["in_flight"])
            Worker(config, lambda: AtOnce(told["answer"]), table).run(stop)
    ended.wait()
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in at_end.items()}
    print(
        json.dumps({"threads": spent, "stages": stages.seconds, "torch": "torch" in sys.modules}), flush=True
    )


if __name__ == "__main__":
    main()
