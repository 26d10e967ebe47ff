"""The jobs that run and the engine they run in: called from one thread, replaced when it dies."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import PurePath

from headrace.engine.errors import EngineDead, EngineError
from headrace.engine.request import EngineStats
from headrace.engine.text_engine import TextCompletion, TextEngine, TextRequest
from headrace.worker.job import Job, Stage

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0


def served_name(model: str) -> str:
    """What jobs and results call a model: its hub id, or the last part of its directory."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


class Running:
    """The engine and what is in it. Every job handed to ``start`` comes back once: from ``collect`` or ``bury``."""

    def __init__(self, open_engine: Callable[[], TextEngine]) -> None:
        self._open_engine = open_engine
        self._engine: TextEngine | None = open_engine()
        self._opening: Future[TextEngine] | None = None
        self._jobs: dict[str, Job] = {}
        self._deaths_in_a_row = 0
        self._open_at = 0.0
        self._stats: EngineStats | None = None
        self.model = served_name(self._engine.model)
        self.slots = self._engine.max_slots

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def ready(self) -> bool:
        """Whether there is an engine to start jobs in."""
        return self._engine is not None

    @property
    def stats(self) -> EngineStats | None:
        """The engine's latest snapshot; a dead one's last. None before the first."""
        try:
            if self._engine is not None:
                self._stats = self._engine.stats()
        except EngineError as error:  # it is dead, which whoever runs something in it will see
            log.debug("no snapshot of the engine: %s", error)
        return self._stats

    def start(self, jobs: Sequence[tuple[Job, TextRequest]]) -> None:
        """Run jobs, each by its request. Raises EngineDead; then they are to be buried too."""
        engine = self._alive()
        for job, request in jobs:
            job.stage = Stage.RUNNING
            self._jobs[request.id] = job
        engine.add_many([request for _, request in jobs])

    def collect(self, timeout: float) -> list[tuple[Job, TextCompletion]]:
        """What ended, waiting up to ``timeout`` seconds for the first. Raises EngineDead."""
        if not self._jobs:
            return []
        ended = self._alive().poll(timeout)
        if ended:
            self._deaths_in_a_row = 0
        return [(self._jobs.pop(each.id), each) for each in ended if each.id in self._jobs]

    def abort(self, jobs: Iterable[Job]) -> None:
        """End these now; they still come back from ``collect``. Raises EngineDead."""
        self._alive().abort([str(job.row.id) for job in jobs])

    def abort_all(self) -> None:
        """End every running job now. Raises EngineDead."""
        if self._jobs:
            self.abort(list(self._jobs.values()))

    def bury(self, death: EngineDead) -> list[Job]:
        """Give up the dead engine; return the jobs that died with it. ``reopen`` opens another, later and later."""
        log.error("the engine died with %d jobs: %s", len(self._jobs), death)
        lost = list(self._jobs.values())
        self._jobs.clear()
        self._close_engine()
        self._open_later()
        return lost

    def reopen(self) -> None:
        """Have another engine opened if there is none and it is time, and take it once it is there.

        That may take minutes. It happens on a thread of its own: cancels, deadlines and commits do not wait for it.
        """
        if self._engine is not None:
            return
        if self._opening is None:
            if time.monotonic() >= self._open_at:
                self._opening = _open_apart(self._open_engine)
            return
        if not self._opening.done():
            return
        opening, self._opening = self._opening, None
        try:
            self._engine = opening.result()
            log.info("another engine is ready")
        except EngineError as error:
            log.error("no other engine: %s", error)
            self._open_later()

    def close(self) -> None:
        """Close the engine, dead or not, and one that is being opened as soon as it is there. Idempotent.

        Nothing waits for the latter: if the Python process ends first, it takes the engine's process with it.
        """
        self._close_engine()
        if self._opening is not None:
            self._opening.add_done_callback(_close_unwanted)
            self._opening = None

    def _open_later(self) -> None:
        self._open_at = time.monotonic() + min(LONGEST_WAIT_S, 0.25 * 2.0**self._deaths_in_a_row)
        self._deaths_in_a_row += 1

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            _close(engine)

    def _alive(self) -> TextEngine:
        if self._engine is None:
            raise EngineDead("there is no engine")
        return self._engine


def _open_apart(open_engine: Callable[[], TextEngine]) -> "Future[TextEngine]":
    """Open an engine on a daemon thread. An executor's would hold up the end of the process, for ever if opening hangs."""
    opening: Future[TextEngine] = Future()

    def run() -> None:
        try:
            engine = open_engine()
        except BaseException as error:  # to be raised where the engine is taken
            opening.set_exception(error)
        else:
            opening.set_result(engine)

    threading.Thread(target=run, name="engine-opener", daemon=True).start()
    return opening


def _close(engine: TextEngine) -> None:
    try:
        engine.close()
    except EngineError as error:
        log.debug("closing the engine: %s", error)


def _close_unwanted(opening: "Future[TextEngine]") -> None:
    if opening.exception() is None:
        _close(opening.result())
