"""Which failures are worth another try, how often, and when.

One table. What is not in it fails at once: trying an invalid job again costs a GPU and gives the same error. An engine that
dies fails no job: those it held run again, as worker/suspects.py says.
"""

import random
from dataclasses import dataclass

from headrace.schemas import ErrorCode


@dataclass(frozen=True, slots=True)
class Retry:
    """attempts: so many may fail, in all workers. The wait doubles from ``first_s`` to ``longest_s``: three minutes together."""

    attempts: int = 10
    first_s: float = 0.5
    longest_s: float = 60.0

    def wait_s(self, failure: int) -> float:
        """How long after the ``failure``-th failure (from 1) the next try is due: full jitter, never under half."""
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(failure - 1, 30))
        return ceiling * random.uniform(0.5, 1.0)


RETRIABLE: dict[str, Retry] = {
    # The host had no memory left to prepare the request or to read its answer, or no process to compile its grammar; other
    # requests give theirs back.
    ErrorCode.OUT_OF_MEMORY: Retry(),
}


def retry_for(code: str, failure: int) -> Retry | None:
    """How to retry after the ``failure``-th failure (from 1), or None if it is final.

    Attempts that a clean stop gave back, or that a death ended, are no failures of the job's.
    """
    retry = RETRIABLE.get(code)
    return retry if retry is not None and failure < retry.attempts else None
