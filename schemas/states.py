"""The states of a job. Every accepted job ends in exactly one terminal state per run."""

from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands; ``code`` is how the job table stores it."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def code(self) -> int:
        """The smallint of the job table: 0 to 5 in the order above, never renumbered."""
        return _CODES[self]

    @property
    def terminal(self) -> bool:
        """Whether a job in this state has ended; only a new run leaves a terminal state."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


_CODES = {state: number for number, state in enumerate(JobState)}
