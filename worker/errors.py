"""What stops a worker: everything else it survives."""


class WorkerError(Exception):
    """Root of what the worker raises on purpose."""


class ConsumerFailed(WorkerError):
    """A consumer met an error that no retry mends (authorization, fencing, a defect)."""
