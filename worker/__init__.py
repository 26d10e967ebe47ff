"""The worker: jobs from Kafka through an engine into the job table and back to Kafka.

Read in this order: worker (its loop is a record's way), job, consumer and offsets (in), admission (what runs next),
attempts and running (the engine), outcomes and publisher (out), bulk (Postgres).
"""

from headrace.worker.admission import Tier, default_tiers
from headrace.worker.config import WorkerConfig
from headrace.worker.errors import ConsumerFailed, WorkerError
from headrace.worker.worker import Worker

__all__ = ["ConsumerFailed", "Tier", "Worker", "WorkerConfig", "WorkerError", "default_tiers"]
