"""The worker: jobs from Kafka through an engine into the job table and back to Kafka.

Read in this order: worker (its loop is a record's way), consumer and offsets (in), admission (what runs next), attempts
(the engine), bulk (Postgres), publisher (out).
"""

from headrace.worker.admission import Tier, default_tiers
from headrace.worker.config import WorkerConfig
from headrace.worker.errors import ConsumerFailed, WorkerError
from headrace.worker.worker import Worker

__all__ = ["ConsumerFailed", "Tier", "Worker", "WorkerConfig", "WorkerError", "default_tiers"]
