"""A job as admission sees it."""

from dataclasses import dataclass


@dataclass(eq=False)
class StubJob:
    """Cost in tokens; whoever takes it out of the queue says when it waits no more."""

    tier: str = "bulk"
    cost: int = 100
    tenant: str = "default"
    deadline_s: float | None = None
    waiting: bool = True
    name: str = ""
