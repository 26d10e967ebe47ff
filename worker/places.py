"""How many jobs an engine is given: what it runs at once, and some that wait inside it."""

WAITING = 256
"""Jobs that may wait in the engine: a window to plan over, from which it fills what comes free. Whose turn it is among a
tier's tenants is the worker's to say, and for these it has said it: so not many more than it takes."""

REMEMBERED_S = 30.0
"""How long the engine is held to be able to run as many at once as it did."""


class Places:
    """How many jobs may be in flight, by how many sequences the engine was seen to run at once.

    An engine has slots for many sequences, but its KV cache may hold few long ones.

    Args:
        most: never more than so many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen = 0
        self._seen_at = 0.0

    def at(self, now: float, running: int) -> int:
        """The number now, while so many sequences run."""
        if running >= self._seen or now - self._seen_at > REMEMBERED_S:
            self._seen, self._seen_at = running, now
        return min(self._most, self._seen + WAITING)
