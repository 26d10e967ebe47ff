"""Headrace: queue-driven batch inference.

``Engine`` and ``Client`` are imported when first asked for, so that the engine alone never pulls in Kafka or
pydantic, and a producer never pulls in torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import Client as Client
    from headrace.engine import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Client", "Engine", "__version__"]

_LAZY = {"Client": "headrace.client", "Engine": "headrace.engine"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
