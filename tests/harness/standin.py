"""An engine that answers without a model: what the worker's tests and the stress runs drive instead of the real one.

Answers come out of order after random latencies, a few at a time. A prompt can script its own fate, so that a job
submitted to a worker in another process is scripted too:

    ``fail:CODE``      ends with that error, final
    ``flaky:N``        fails with a retriable error the first N times it is tried by this engine object
    ``busy-unless:PATH``  fails with a retriable error until the file PATH exists
    ``slow:SECONDS``   takes that long
    ``until:PATH``     takes until the file PATH exists
    ``fail-unless:PATH``, ``die-unless:PATH``  the same as fail and die, until the file PATH exists
    ``die``            the engine dies with all it holds
    ``die-whole``      the whole worker dies with it, as by kill -9
    ``die-once:PATH``  the engine dies, unless the file PATH exists; it is created first
    anything else      is answered with ``echo: <prompt>``
"""

import heapq
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.answers import TextChoice
from headrace.engine.errors import EngineDead
from headrace.engine.request import EngineStats, FinishReason
from headrace.engine.text_engine import RequestError, TextCompletion, TextRequest

LOOK_EVERY_S = 0.02  # for a file that a job waits for


@dataclass
class StandInEngine:
    """TextEngine with ``slots`` requests at once, each taking a random time up to ``latency_s``."""

    model: str = "stand-in"
    max_context: int = 4096
    slots: int = 64
    latency_s: float = 0.01
    seed: int | None = None
    tries: Counter[str] = field(default_factory=Counter)
    seen: list[str] = field(default_factory=list)
    dead: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._waiting: list[tuple[int, float, int, TextRequest, float]] = []
        self._running: list[tuple[float, int, TextRequest, float]] = []
        self._ended: list[TextCompletion] = []
        self._live: set[str] = set()
        self._count = 0

    @property
    def max_slots(self) -> int:
        """As the engine says it."""
        return self.slots

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        self._check()
        now = time.monotonic()
        for request in requests:
            assert request.id not in self._live, f"{request.id} is already running"
            self._live.add(request.id)
            self.seen.append(request.id)
            self._count += 1
            entry = (request.priority, request.deadline or float("inf"), self._count, request, now)
            heapq.heappush(self._waiting, entry)

    def poll(self, timeout: float) -> list[TextCompletion]:
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            self._advance(time.monotonic())
            if self._ended or time.monotonic() >= deadline:
                ended, self._ended = self._ended, []
                return ended
            due = self._running[0][0] if self._running else deadline
            time.sleep(max(0.0005, min(due, deadline) - time.monotonic()))

    def abort(self, ids: Sequence[str]) -> None:
        wanted = self._live.intersection(ids)
        held = [entry[3] for entry in self._waiting] + [entry[2] for entry in self._running]
        self._running = [entry for entry in self._running if entry[2].id not in wanted]
        heapq.heapify(self._running)
        for request in held:
            if request.id in wanted:
                self._end(_answer(request, FinishReason.ABORT, 0.0))

    def stats(self) -> EngineStats:
        running = len(self._running)
        waiting = len(self._live) - running
        return EngineStats(running, waiting, 64, 64 - running, 0, running, 32, 0, 0, 0, 0, 0, 0, 0)

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        """Die now, as on a device error; the next call of any kind raises EngineDead."""
        self.dead = True

    def _advance(self, now: float) -> None:
        while self._waiting and len(self._running) < self.slots:
            _, _, order, request, added = heapq.heappop(self._waiting)
            if request.id in self._live:
                heapq.heappush(self._running, (now + self._duration(request), order, request, added))
        while self._running and self._running[0][0] <= now:
            _, order, request, added = heapq.heappop(self._running)
            if request.id in self._live and _must_wait(request):
                heapq.heappush(self._running, (now + LOOK_EVERY_S, order, request, added))
            elif request.id in self._live:
                self._end(self._outcome(request, now - added))

    def _outcome(self, request: TextRequest, elapsed: float) -> TextCompletion:
        command, _, argument = _text(request).partition(":")
        self.tries[request.id] += 1
        broken = command.endswith("-unless") and not Path(argument).exists()
        if command == "fail-unless" and broken:
            return _error(request, RequestError("no_good", "scripted to fail until it is mended"))
        if command == "busy-unless" and broken:
            return _error(request, RequestError("out_of_memory", "scripted to fail for now"))
        dies = command == "die" or (command == "die-unless" and broken)
        if dies or (command == "die-once" and _first_time(argument)):
            self.kill()
            self._check()
        if command == "die-whole":
            os.kill(os.getpid(), signal.SIGKILL)
        if command == "fail":
            return _error(request, RequestError(argument, f"scripted to fail with {argument}"))
        if command == "flaky" and self.tries[request.id] <= int(argument):
            return _error(request, RequestError("out_of_memory", "scripted to fail for now"))
        return _answer(request, FinishReason.STOP, elapsed)

    def _duration(self, request: TextRequest) -> float:
        command, _, argument = _text(request).partition(":")
        return float(argument) if command == "slow" else self._random.random() * self.latency_s

    def _end(self, completion: TextCompletion) -> None:
        self._live.discard(completion.id)
        self._ended.append(completion)

    def _check(self) -> None:
        if self.dead:
            raise EngineDead("the stand-in engine was told to die")


def _text(request: TextRequest) -> str:
    if request.messages:
        return str(request.messages[-1].get("content"))
    return request.prompt or ""


def _must_wait(request: TextRequest) -> bool:
    command, _, argument = _text(request).partition(":")
    return command == "until" and not Path(argument).exists()


def _answer(request: TextRequest, reason: FinishReason, elapsed: float) -> TextCompletion:
    text = f"echo: {_text(request)}"
    choice = TextChoice(0, text, list(range(4)), reason, None)
    aborted = reason is FinishReason.ABORT
    return TextCompletion(request.id, [choice], 8, 0, 4, 0, 0.0, elapsed, elapsed, aborted=aborted)


def _error(request: TextRequest, error: RequestError) -> TextCompletion:
    return TextCompletion(request.id, [], error=error)


def _first_time(path: str) -> bool:
    try:
        os.close(os.open(Path(path), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
