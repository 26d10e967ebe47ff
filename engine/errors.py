"""What can go wrong in the engine: one root, nouns for causes."""


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class InvalidRequest(EngineError):
    """One request cannot be run as asked; ``param`` names the field, the message what is allowed."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class UnsupportedModel(EngineError):
    """The checkpoint asks for an architecture or a feature that is not implemented; the message names it."""


class ModelNotFound(EngineError):
    """No model at that path or hub id, or the hub cannot be reached."""


class BadCheckpoint(EngineError):
    """Weights, tokenizer or config are missing, malformed or do not fit each other."""


class OutOfMemory(EngineError):
    """The KV cache or the device cannot hold what the configuration asks for."""


class EngineDead(EngineError):
    """The engine process ended; every request it held must be given elsewhere."""
