"""What a worker is through with takes no memory, whoever still knows of it."""

from headrace.worker.consumer import Delivery
from headrace.worker.held import Held
from headrace.worker.job import Job, Stage, read
from headrace.worker.offsets import Assignment
from headrace.worker.timetable import Timetable


def test_a_job_that_is_forgotten_keeps_neither_its_record_nor_its_prompt() -> None:
    released: list[Delivery] = []
    held = Held(released.append)
    record = Delivery("bulk", Assignment("t", 0), 7, 1_800_000_000_000, None, b'{"prompt": "long"}', [])
    job = read(record, "pool", frozenset())
    assert isinstance(job, Job)
    assert held.take(job) is job
    deadlines: Timetable[Job] = Timetable(lambda each: each.stage is not Stage.GONE)
    deadlines.put(4e9, job)  # which knows the job until then

    held.forget(job)
    assert released == [record]
    assert (job.deliveries, job.request, len(held)) == ([], None, 0)
    assert deadlines.due(5e9) == []
