"""What can go wrong for a producer: one root, nouns for causes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.client.lines import Problem


class ClientError(Exception):
    """Root of everything the client raises on purpose."""


class InvalidLine(ClientError):
    """A line that cannot be written, or that would not become a job where a strict submit met it; nothing after it was sent."""

    def __init__(self, problem: "Problem") -> None:
        super().__init__(str(problem))
        self.problem = problem


class NoJobs(ClientError):
    """There is no line to send; nothing was sent, and no batch was opened."""


class InvalidName(ClientError):
    """The name of a batch or a tenant, or something else that a whole batch is given, is not usable."""


class DeliveryFailed(ClientError):
    """Kafka did not take some records in time. ``keys`` are those of the first few."""

    def __init__(self, message: str, failed: int, keys: Sequence[str]) -> None:
        super().__init__(message)
        self.failed = failed
        self.keys = keys


class BrokerUnreachable(ClientError):
    """No broker answered. ``remedy`` is what may help, where the reason tells."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class TopicMissing(ClientError):
    """A topic of the installation does not exist; ``headrace topics create`` makes it."""
