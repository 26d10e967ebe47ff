"""Jobs that are not run again, and why: what `headrace retry` and `headrace dlq replay` say of them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.cli.output import count

if TYPE_CHECKING:
    from headrace.schemas import JobState


@dataclass(slots=True)
class LeftOut:
    """Jobs that could only end as cancelled or expired, by the names that the user knows them by."""

    cancelled: list[str] = field(default_factory=list)
    """A cancel holds for them."""
    expired: list[str] = field(default_factory=list)
    """Their deadline has passed."""

    def add(self, name: str, bound_for: "JobState") -> None:
        """Leave one out that could only end as it is ``bound_for``."""
        from headrace.schemas import JobState

        (self.cancelled if bound_for is JobState.CANCELLED else self.expired).append(name)

    def reasons(self) -> list[str]:
        """A sentence for each reason why some do not run again."""
        reasons = []
        if self.cancelled:
            why = "a cancel holds, so the next run would end as cancelled"
            reasons.append(not_again(len(self.cancelled), why, self.cancelled[0]))
        if self.expired:
            why = "the deadline has passed, so the next run would end as expired"
            reasons.append(not_again(len(self.expired), why, self.expired[0]))
        return reasons


def not_again(jobs: int, why: str, first: str) -> str:
    """The sentence on so many jobs that do not run again."""
    return f"{count(jobs, 'job')} cannot run again: {why} (the first: {first})."
