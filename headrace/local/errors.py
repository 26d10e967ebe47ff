"""What can go wrong with the embedded stack: one root, nouns for causes; each says what to do about it."""


class LocalError(Exception):
    """Root of everything the embedded stack raises on purpose. ``remedy`` is a sentence for the user."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class MissingPart(LocalError):
    """The broker's or the database's binaries are not installed."""


class ChildFailed(LocalError):
    """A process of the stack ended, or was not ready in time."""


class AlreadyRunning(LocalError):
    """Another stack holds this state directory."""


class StateNotKept(LocalError):
    """The state directory cannot be made or written to."""


class Interrupted(LocalError):
    """The user asked to stop while the stack was starting."""

    def __init__(self) -> None:
        super().__init__("Interrupted.")
