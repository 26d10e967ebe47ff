"""Token ids in, token ids out: continuous batching over a paged KV cache.

Names are imported when first asked for, so that a process that only talks to an engine never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig as EngineConfig
    from headrace.engine.engine import Engine as Engine
    from headrace.engine.process import EngineProcess as EngineProcess
    from headrace.engine.request import Completion as Completion
    from headrace.engine.request import FinishReason as FinishReason
    from headrace.engine.request import Request as Request
    from headrace.engine.request import SamplingParams as SamplingParams

_HOMES = {
    "Completion": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineProcess": "process",
    "FinishReason": "request",
    "Request": "request",
    "SamplingParams": "request",
}
__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineProcess",
    "FinishReason",
    "Request",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"headrace.engine.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'headrace.engine' has no attribute {name!r}")
