"""The worker: jobs from Kafka through an engine into the job table and back to Kafka.

Read in this order: worker (its loop is a record's way), job, consumer and offsets (in), tiers, admission and tier_queue
(what runs next), attempts and running (the engine), outcomes and publisher (out), bulk (Postgres).

Names are imported when first asked for, so that admission alone needs neither Kafka nor Postgres.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.worker.config import WorkerConfig as WorkerConfig
    from headrace.worker.errors import ConsumerFailed as ConsumerFailed
    from headrace.worker.errors import WorkerError as WorkerError
    from headrace.worker.tiers import Tier as Tier
    from headrace.worker.tiers import default_tiers as default_tiers
    from headrace.worker.worker import Worker as Worker

_HOMES = {
    "ConsumerFailed": "errors",
    "Tier": "tiers",
    "Worker": "worker",
    "WorkerConfig": "config",
    "WorkerError": "errors",
    "default_tiers": "tiers",
}
__all__ = ["ConsumerFailed", "Tier", "Worker", "WorkerConfig", "WorkerError", "default_tiers"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"headrace.worker.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'headrace.worker' has no attribute {name!r}")
