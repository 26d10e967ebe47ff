"""From settings to an engine, for the worker and for `headrace generate`."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.engine.config import EngineConfig
    from headrace.engine.text_engine import TextCompletion, TextEngine, TextRequest
    from headrace.settings import Settings


def engine_config(settings: "Settings") -> "EngineConfig":
    """How to set the engine up. Fetches the default model where the settings name none."""
    from headrace.engine.config import EngineConfig

    return EngineConfig(
        model=settings.model or default_model(),
        device=settings.device,
        dtype=settings.dtype,
        kv_tokens=settings.kv_tokens,
        memory_fraction=settings.memory_fraction,
        max_slots=settings.max_slots,
        max_batched_tokens=settings.max_batched_tokens,
        max_context=settings.max_context,
        batch_invariant=settings.batch_invariant,
        chat_template=None if settings.chat_template is None else str(settings.chat_template),
        tool_form=settings.tool_form,
    )


def open_engine(config: "EngineConfig", name: str) -> "TextEngine":
    """Load the model, to be known as ``name``, in a process of its own."""
    from headrace.engine.text import open_text_engine
    from headrace.engine.tokenizer import leave_torch_out

    leave_torch_out()
    engine = open_text_engine(config)
    engine.model = name
    return engine


class OnDemand:
    """An engine that is opened for its first request: where there is nothing to run, no model is loaded."""

    def __init__(self, open: "Callable[[], TextEngine]") -> None:
        self._open = open
        self._engine: TextEngine | None = None

    def add_many(self, requests: "Sequence[TextRequest]") -> None:
        """As TextEngine's, opening it if need be."""
        if self._engine is None:
            self._engine = self._open()
        self._engine.add_many(requests)

    def poll(self, timeout: float) -> "list[TextCompletion]":
        """As TextEngine's."""
        return [] if self._engine is None else self._engine.poll(timeout)

    def abort(self, ids: "Sequence[str]") -> None:
        """As TextEngine's."""
        if self._engine is not None:
            self._engine.abort(ids)

    def close(self) -> None:
        """As TextEngine's."""
        if self._engine is not None:
            self._engine.close()


def served_name(settings: "Settings") -> str:
    """What jobs and results call the model: its hub id, or the last part of its directory (the rest is no user's)."""
    if settings.model is None:
        from headrace.local.model import NAME

        return NAME
    path = Path(settings.model).expanduser()
    return path.resolve().name if path.is_dir() else settings.model


def default_model() -> str:
    """Directory of the model that runs where none is named."""
    from headrace.local.model import default_model

    return str(default_model())
