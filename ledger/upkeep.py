"""What keeps the job table in order while it is used: days made ahead, what is old forgotten, the backlog looked at.

On a thread of its own. Any of it may have to wait for a lock, and the thread that polls Kafka must not: past
max.poll.interval.ms its group gives its partitions to others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event

import psycopg

from headrace.ledger.errors import LedgerError, NotMigrated
from headrace.ledger.ledger import Ledger
from headrace.ledger.watch import RecorderMetrics

log = logging.getLogger(__name__)

MINUTE_S, HOUR_S = 60.0, 3600.0
STOP_S = 5.0


@dataclass(slots=True)
class Chore:
    """Work that comes again: `every` so many seconds, after a failure `again` in so many. due: on the monotonic clock."""

    name: str
    work: Callable[[], object]
    every: float
    again: float
    due: float = 0.0


def chores(ledger: Ledger, metrics: RecorderMetrics, keep: timedelta) -> list[Chore]:
    """A recorder's. Each waits for its locks for seconds only, and everybody else behind it: so none comes again soon."""

    def backlog() -> None:
        metrics.backlog = ledger.backlog()

    def retire() -> None:
        for day in ledger.retire(keep):
            log.info("dropped the partitions of %s", day)

    return [
        Chore("partitions", ledger.ensure_partitions, HOUR_S, MINUTE_S),
        Chore("backlog", backlog, 15.0, 15.0),
        Chore("drain", ledger.drain, 5 * MINUTE_S, 5 * MINUTE_S),
        Chore("retire", retire, HOUR_S, HOUR_S),
    ]


class Upkeep:
    """Does the chores, one after the other, until told to stop.

    What fails is told, counted and tried again. Only a database without our tables ends it, and a defect of ours: then
    `check` raises that.
    """

    def __init__(self, chores: Sequence[Chore], metrics: RecorderMetrics) -> None:
        self._chores, self._metrics = chores, metrics
        self._ended_by: BaseException | None = None
        # A statement that waits at the moment of the stop ends by its own timeouts; nobody waits for that.
        self._thread = threading.Thread(target=self._run, name="recorder-upkeep", daemon=True)

    def start(self, stop: Event) -> None:
        """Begin. The first round comes at once."""
        self._stop = stop
        self._thread.start()

    def check(self) -> None:
        """Raise what ended it, if anything did."""
        if self._ended_by is not None:
            raise self._ended_by

    def join(self) -> None:
        """Wait for its end after the stop, for STOP_S at most."""
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.info("upkeep still waits for Postgres and is left behind; what it began is undone there")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for chore in self._chores:
                    if time.monotonic() >= chore.due and not self._stop.is_set():
                        self._do(chore)
                self._stop.wait(min(chore.due for chore in self._chores) - time.monotonic())
        except BaseException as error:
            self._ended_by = error

    def _do(self, chore: Chore) -> None:
        wait = chore.again
        try:
            chore.work()
        except NotMigrated:
            raise  # nothing can be recorded here, however long it waits
        except (LedgerError, psycopg.Error) as error:
            log.warning("upkeep (%s) failed, again in %.0f s: %s", chore.name, chore.again, error)
            self._metrics.upkeep_failed(chore.name, str(error))
        else:
            wait = chore.every
            self._metrics.upkeep_done(chore.name)
        chore.due = time.monotonic() + wait
