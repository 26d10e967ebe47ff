"""How the engine treats requests of each priority: what it keeps free for them and whom they may push back.

Priorities are counted from 0, the most urgent. Pure values, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """One priority.

    reserve: share of slots and KV blocks, in [0, 1), that less urgent newcomers leave free. preempts: whether a
    newcomer may push back less urgent sequences that run, when there is no slot or no block for it. max_preemptions:
    how often such newcomers may push back one sequence of this priority.
    """

    reserve: float = 0.0
    preempts: bool = True
    max_preemptions: int = 3

    def __post_init__(self) -> None:
        if not 0.0 <= self.reserve < 1.0:
            raise EngineError(f"reserve must lie in [0, 1), not {self.reserve}")
        if self.max_preemptions < 0:
            raise EngineError(f"max_preemptions must not be negative, as {self.max_preemptions} is")


class Priorities:
    """The priorities there are. One beyond them is treated as ``Priority()`` says.

    Raises EngineError where they reserve everything, so that the least urgent could never run.
    """

    def __init__(self, priorities: Sequence[Priority]) -> None:
        if sum(each.reserve for each in priorities) >= 1.0:
            raise EngineError("the reserves of all priorities must add up to less than 1")
        self._known = tuple(priorities)
        self._other = Priority()

    def __getitem__(self, priority: int) -> Priority:
        return self._known[priority] if 0 <= priority < len(self._known) else self._other

    def reserved_above(self, priority: int) -> float:
        """The share of slots and blocks that a newcomer of this priority must leave to more urgent ones."""
        return sum(each.reserve for each in self._known[: max(priority, 0)])
