"""The engine in a process of its own, so that Kafka, Postgres and tokenising never hold its interpreter lock.

Parent and child talk over one private pipe. The parent's reader thread always drains it, so the child never waits to
report; the child looks for commands between steps. A child whose parent is gone sees the pipe close and ends.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineDead, EngineError
from headrace.engine.intake import new_sequence, refuse_duplicates
from headrace.engine.request import EngineStats, ModelInfo, Request, StepOutput

NEW_OBJECTS = 50_000  # made and kept before Python looks for cycles; its own 700 are those of a few requests
STATS_EVERY_S = 0.25
IDLE_WAIT_S = 1.0
CLOSE_GRACE_S = 2.0  # commands are looked at between steps, and a step of a long prompt on a CPU takes longer


class EngineProcess:
    """A TokenEngine whose work happens in a child process. Raises what Engine raises when it cannot be built."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        # daemon: a parent that ends, while the model is still loaded say, ends the child and does not wait for it.
        self._process = context.Process(
            target=_serve, args=(config, child_end), name="headrace-engine", daemon=True
        )
        self._process.start()
        # What multiprocessing sends to a daemon at the end, and then waits for, is SIGTERM, to which the child is deaf.
        atexit.register(self._process.kill)
        child_end.close()
        self._running: set[str] = set()
        self._outputs: queue.SimpleQueue[StepOutput | None] = queue.SimpleQueue()
        self.info, self._stats = self._wait_until_ready()
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def add_many(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises InvalidRequest, and then takes none of them."""
        refuse_duplicates(requests, self._running)
        for request in requests:
            new_sequence(request, self.info, arrival=0)
        ids = [request.id for request in requests]
        self._running.update(ids)  # before the child may answer
        try:
            self._send("add_many", list(requests))
        except BaseException:
            self._running.difference_update(ids)
            raise

    def finish(self, request_id: str, at_token: int) -> None:
        """The text of this request is complete after its first ``at_token`` generated tokens."""
        self._send("finish", request_id, at_token)

    def abort(self, request_id: str) -> None:
        """End this request now; unknown ids are ignored."""
        self._send("abort", request_id)

    def poll(self, timeout: float) -> StepOutput:
        """Everything reported since the last call, waiting up to ``timeout`` seconds for the first."""
        merged = StepOutput()
        try:
            part = self._outputs.get(timeout=timeout)
            while True:
                if part is None:
                    self._outputs.put(None)
                    if not merged:
                        raise self._dead()
                    break
                merged.extend(part)
                part = self._outputs.get_nowait()
        except queue.Empty:
            pass
        self._running.difference_update(completion.id for completion in merged.completions)
        return merged

    def stats(self) -> EngineStats:
        """The latest snapshot that the child sent."""
        return self._stats

    def close(self) -> None:
        """End the child: politely, then not. Idempotent."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):  # it may be ending by itself
                self._pipe.send(("close", ()))
            self._process.join(CLOSE_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)
        self._pipe.close()

    def _send(self, command: str, *args: Any) -> None:
        try:
            self._pipe.send((command, args))
        except OSError as error:
            raise self._dead() from error

    def _wait_until_ready(self) -> tuple[ModelInfo, EngineStats]:
        try:
            kind, content = self._pipe.recv()
        except EOFError:
            raise self._dead() from None
        if kind == "failed":
            self._process.join()
            raise content
        info, stats = content
        return info, stats

    def _read(self) -> None:
        """Reader thread: outputs to the queue, stats to their place, None at the end."""
        try:
            while True:
                kind, content = self._pipe.recv()
                if kind == "output":
                    self._outputs.put(content)
                else:
                    self._stats = content
        except (EOFError, OSError):
            self._outputs.put(None)

    def _dead(self) -> EngineDead:
        self._process.join(1.0)
        return EngineDead(f"the engine process ended with exit code {self._process.exitcode}")


def _serve(config: EngineConfig, pipe: Connection) -> None:
    """The child: build the engine, then alternate between commands and steps until told to close."""
    # Terminals and supervisors tell all processes of a group that they are to end: how is the parent's to say.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from headrace.engine.engine import Engine

    try:
        engine = Engine(config)
    except EngineError as error:
        pipe.send(("failed", error))
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", EngineError(f"{type(error).__name__}: {error}")))
        return
    _collect_seldom()
    pipe.send(("ready", (engine.info, engine.stats())))
    try:
        _loop(engine, pipe)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(
            1
        )  # at once: on a device that failed, who tidies up may wait for ever, and the parent with it
    engine.close()
    gc.unfreeze()  # else the interpreter keeps Triton's objects to its end, and its bindings print them as leaks


def _collect_seldom() -> None:
    """Look for cycles seldom, and never among what the engine was built of: a look at all of that stops a step for 0.15 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 50)


def _loop(engine: Any, pipe: Connection) -> None:
    stats_at = 0.0
    while True:
        while pipe.poll(0 if engine.has_work else IDLE_WAIT_S):
            command, args = pipe.recv()
            if command == "close":
                return
            getattr(engine, command)(*args)
        output = engine.step()
        if output:
            pipe.send(("output", output))
        now = time.monotonic()
        if now - stats_at >= STATS_EVERY_S:
            stats_at = now
            pipe.send(("stats", engine.stats()))
