"""All that a worker holds: its jobs by id, and the way their records go back to their consumers."""

from collections.abc import Callable, Iterator
from uuid import UUID

from headrace.worker.consumer import Delivery
from headrace.worker.job import Job, Stage


class Held:
    """The jobs in memory. ``release`` tells a record's consumer that nothing more will come of it."""

    def __init__(self, release: Callable[[Delivery], None]) -> None:
        self.release = release
        self._jobs: dict[UUID, Job] = {}

    def take(self, job: Job) -> Job:
        """The job that is held under this id: this one, unless there was one already."""
        return self._jobs.setdefault(job.row.id, job)

    def drop(self, job: Job) -> list[Delivery]:
        """Hold it no more, and return its records, which go another way."""
        job.stage = Stage.GONE
        if job in self:
            del self._jobs[job.row.id]
        # A queue or a timetable may know the job for a day yet. Its prompt would be in nobody's bound of memory.
        records, job.deliveries, job.request = job.deliveries, [], None
        return records

    def forget(self, job: Job) -> None:
        """The worker is through with this job, or its records are another worker's now."""
        for delivery in self.drop(job):
            self.release(delivery)

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(job.row.id) is job

    def __iter__(self) -> Iterator[Job]:
        """A snapshot: jobs may come and go meanwhile."""
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)
