"""Says every few seconds that this worker lives; when that stops, other workers take its jobs over."""

import logging
import threading

from headrace.ledger import Ledger, LedgerError, LedgerUnavailable
from headrace.ledger.outage import Outage

log = logging.getLogger(__name__)

BEATS_PER_LIFE = 3
AGAIN_AFTER_S = 1.0


class Heartbeat:
    """A thread that keeps the worker's row in the `workers` table alive."""

    def __init__(self, ledger: Ledger, worker: str, pool: str, model: str, alive_s: float) -> None:
        self._ledger, self._worker, self._pool, self._model = ledger, worker, pool, model
        self._alive_s = alive_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, stop: threading.Event) -> bool:
        """Beat once, then go on in the background: no attempt may be written by a worker that nobody knows.

        Waits for Postgres, however long: it may have gone while the model was loaded. False if told to stop before that.
        """
        outage = Outage(log)
        while not stop.is_set():
            try:
                self._beat()
            except LedgerUnavailable as error:
                outage.lasts("Postgres", "waiting for Postgres", error)
                stop.wait(AGAIN_AFTER_S)
            else:
                outage.over()
                self._thread.start()
                return True
        return False

    def close(self) -> None:
        """Say that this worker has left, where anybody knows it."""
        if self._thread.ident is None:
            return
        self._stop.set()
        self._thread.join(timeout=5)
        try:
            self._ledger.leave(self._worker)
        except LedgerError as error:
            log.warning("could not sign off, so other workers wait %g s: %s", self._alive_s, error)

    def _run(self) -> None:
        while not self._stop.wait(self._alive_s / BEATS_PER_LIFE):
            try:
                self._beat()
            except Exception as error:  # whatever it was: a worker that stops beating is taken for dead
                log.warning("no heartbeat: %s", error)

    def _beat(self) -> None:
        self._ledger.heartbeat(self._worker, self._pool, self._model, self._alive_s)
