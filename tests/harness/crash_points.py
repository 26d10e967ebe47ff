"""Where a process under test may be made to die, as kill -9 would, or to fall asleep: each step by itself.

The code under test knows nothing of it: a point is a method that is replaced by one that dies before or after it.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from headrace.ledger import Ledger
from headrace.ledger.counters import Tally
from headrace.ledger.recorder import Recorder
from headrace.store import Store
from headrace.worker.consumer import TierConsumer

ASLEEP = "asleep in mid-transaction"  # with rows and counters locked

POINTS: dict[str, tuple[type, str, str]] = {
    "after the attempt's row": (Ledger, "begin", "after"),
    "after a large result was kept": (Store, "write", "after"),
    "after the guarded write, before the publish": (Ledger, "finish", "after"),
    "after the publish, before the commit": (TierConsumer, "_send_commit", "before"),
    "during a revoke": (TierConsumer, "_on_revoke", "before"),
    "after the rejection's row": (Ledger, "reject", "after"),
    "after a job was opened again": (Ledger, "reopen", "after"),
    "after the recorder's write": (Recorder, "_settle", "writing"),
    ASLEEP: (Tally, "write", "asleep"),
}


def arm(point: str | None) -> None:
    """Make this process die the first time that it comes to ``point``."""
    if point is None:
        return
    owner, name, when = POINTS[point]
    method: Callable[..., Any] = getattr(owner, name)

    def deadly(self: Any, *args: Any, **kwargs: Any) -> Any:
        if when == "before" and (name != "_send_commit" or args[1]):  # a commit of nothing is no commit
            die()
        if when == "writing" and self._writing is not None:
            self._writing[1].result()
            die()
        result = method(self, *args, **kwargs)
        if when == "asleep" and self.batches:
            setattr(owner, name, method)  # once
            os.kill(os.getpid(), signal.SIGSTOP)
        if when == "after" and (not args or args[0]):
            die()
        return result

    setattr(owner, name, deadly)


def die() -> None:
    """End as if killed: nothing is flushed, no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)
