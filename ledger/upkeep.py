"""What keeps the job table in order while it is used: days made ahead, what is old forgotten, the backlog looked at.

On threads of their own. Any of it may have to wait for a lock, and the thread that polls Kafka must not: past
max.poll.interval.ms its group gives its partitions to others. Nor must the backlog, which is looked at every few
seconds, wait while an old day is read through, which may take minutes.
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
    """Work that comes again: `every` so many seconds, after a failure `again` in so many.

    long: it may take minutes, so the others do not wait for it. due: on the monotonic clock.
    """

    name: str
    work: Callable[[], object]
    every: float
    again: float
    long: bool = False
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
        Chore("retire", retire, HOUR_S, HOUR_S, long=True),
    ]


class Upkeep:
    """Does the chores until told to stop: the short ones one after the other, and beside them the long ones.

    What fails is told, counted and tried again. Only a database without our tables ends it, and a defect of ours: then
    `check` raises that.
    """

    def __init__(self, chores: Sequence[Chore], metrics: RecorderMetrics) -> None:
        self._metrics = metrics
        self._ended_by: BaseException | None = None
        # A statement that waits at the moment of the stop ends by its own timeouts; nobody waits for that.
        self._threads = [
            threading.Thread(target=self._run, args=(some,), name=name, daemon=True)
            for name, some in (
                ("recorder-upkeep", [chore for chore in chores if not chore.long]),
                ("recorder-upkeep-long", [chore for chore in chores if chore.long]),
            )
            if some
        ]

    def start(self, stop: Event) -> None:
        """Begin. The first round comes at once."""
        self._stop = stop
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what ended it, if anything did."""
        if self._ended_by is not None:
            raise self._ended_by

    def join(self) -> None:
        """Wait for its end after the stop, for STOP_S at most in all."""
        give_up = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.info("upkeep still waits for Postgres and is left behind; what it began is undone there")

    def _run(self, chores: Sequence[Chore]) -> None:
        try:
            while not self._stop.is_set():
                for chore in chores:
                    if time.monotonic() >= chore.due and not self._stop.is_set():
                        self._do(chore)
                self._stop.wait(min(chore.due for chore in chores) - time.monotonic())
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
