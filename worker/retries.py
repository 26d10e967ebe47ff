"""Which failures are worth another try, how often, and when.

One table. What is not in it fails at once: trying an invalid job again costs a GPU and gives the same error.
"""

import random
from dataclasses import dataclass

from headrace.engine.text_engine import RequestError


@dataclass(frozen=True, slots=True)
class Retry:
    """attempts: at most so many in all. The wait doubles from ``first_s`` up to ``longest_s``."""

    attempts: int = 4
    first_s: float = 0.5
    longest_s: float = 60.0

    def wait_s(self, attempt: int) -> float:
        """How long after the ``attempt``-th failure (from 1) the next try is due: full jitter, never under half."""
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(attempt - 1, 30))
        return ceiling * random.uniform(0.5, 1.0)


RETRIABLE: dict[str, Retry] = {
    # The engine holds as many requests as it can; nothing is wrong with the job.
    "engine_busy": Retry(attempts=20),
    # The KV cache or the device ran out of memory for now.
    "out_of_memory": Retry(attempts=4, first_s=2.0),
}

# An engine may call an error retriable that the table does not know.
BY_THE_ENGINE = Retry()


def retry_for(error: RequestError, attempt: int) -> Retry | None:
    """How to retry after the ``attempt``-th failure, or None if it is final."""
    retry = RETRIABLE.get(error.code) or (BY_THE_ENGINE if error.retriable else None)
    return retry if retry is not None and attempt < retry.attempts else None
