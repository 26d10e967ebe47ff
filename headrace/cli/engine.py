"""From settings to an engine's configuration, for the worker and for `headrace generate`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
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


def default_model() -> str:
    """Directory of the model that runs where none is named."""
    from headrace.local.model import default_model

    return str(default_model())
