"""Waiting for others while a batch is followed: on, until it is told to stop, and never without a word."""

import time
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from headrace.cli.output import note

if TYPE_CHECKING:
    from headrace.ledger import BatchProgress

AGAIN_S = 1.0  # between two questions to a Postgres that is away
QUIET_S = 10.0  # without news and without anything to run, before somebody is told

T = TypeVar("T")


class Waiting:
    """What a follower says on stderr of what it waits for: once each time, and not what goes as it should.

    answered: Postgres has answered this command before, so its address is right.
    """

    def __init__(self, stop: Event, batch_id: str = "", *, answered: bool = False) -> None:
        self._stop, self._batch_id = stop, batch_id
        self._answered, self._away = answered, False
        self._last: BatchProgress | None = None
        self._since: float | None = time.monotonic()

    def ask(self, question: Callable[[], T]) -> T | None:
        """What the job table says, however long Postgres is away; None where ``stop`` was set before it came back.

        Where it has never answered it is not waited for: raises LedgerUnavailable.
        """
        from headrace.ledger import LedgerUnavailable

        while True:
            try:
                answer = question()
            except LedgerUnavailable as error:
                if not self._answered:
                    raise
                if not self._away:
                    note(f"Postgres does not answer ({str(error).partition(chr(10))[0]}); waiting for it.")
                self._away = True
                if self._stop.wait(AGAIN_S):
                    return None
            else:
                if self._away:
                    note("Postgres is back.")
                self._answered, self._away = True, False
                return answer

    def look(self, now: float, batch: "BatchProgress | None") -> None:
        """Say who may be missing where a batch that is not over, looked at ``now``, has nothing to run for a while."""
        if batch != self._last or (batch is not None and batch.running + batch.queued > 0):
            self._last, self._since = batch, now
        elif self._since is not None and now - self._since >= QUIET_S:
            self._since = None
            note(
                f"Nothing of batch {self._batch_id} runs, and nothing new has come for {QUIET_S:g} s: waiting for its producer,"
                " or for the recorder. Is `headrace recorder` running?"
            )
