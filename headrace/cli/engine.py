"""From settings to an engine, for the worker and for `headrace generate`."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.engine.text import TextEngine
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
    )


def open_engine(config: "EngineConfig", name: str) -> "TextEngine":
    """Load the model, to be known as ``name``."""
    from headrace.engine.text import open_text_engine

    engine = open_text_engine(config)
    engine.model = name
    return engine


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
