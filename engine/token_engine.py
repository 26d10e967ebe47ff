"""The surface that the text side needs of an engine, in this process or in a child."""

from collections.abc import Sequence
from typing import Protocol

from headrace.engine.request import EngineStats, ModelInfo, Request, StepOutput


class TokenEngine(Protocol):
    """Token ids in, token ids out. Calls come from one thread."""

    @property
    def info(self) -> ModelInfo:
        """What model it runs."""

    def add_many(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises InvalidRequest (nothing is taken then)."""

    def finish(self, request_id: str, at_token: int) -> None:
        """The text of this request is complete after its first ``at_token`` generated tokens."""

    def abort(self, request_id: str) -> None:
        """End this request now; unknown ids are ignored."""

    def poll(self, timeout: float) -> StepOutput:
        """What happened since the last call, waiting up to ``timeout`` seconds for the first. Raises EngineDead."""

    def stats(self) -> EngineStats:
        """The latest snapshot; never waits for a step."""

    def close(self) -> None:
        """Stop and release the device. Idempotent."""
