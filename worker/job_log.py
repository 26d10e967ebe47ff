"""What becomes of single jobs, told in the log by their ids and codes: never by what they ask or answer."""

import logging
from typing import Any

from headrace.schemas import JobState
from headrace.worker.job import Job, Rejection
from headrace.worker.metrics import known_code

log = logging.getLogger(__name__)


def ended(job: Job, state: JobState, code: str | None) -> None:
    """This worker's write ended a job. What may come by thousands a second is told at DEBUG."""
    level = logging.DEBUG if state in (JobState.SUCCEEDED, JobState.CANCELLED) else logging.INFO
    if log.isEnabledFor(level):
        log.log(level, "job %s", state, extra=_ids(job) | {"run": job.run, **_code(code)})


def cancelled(jobs: int) -> None:
    """This worker's writes ended so many jobs as cancelled."""
    log.info("%d cancelled %s ended", jobs, "job" if jobs == 1 else "jobs")


def retried(job: Job, code: str, wait_s: float) -> None:
    """An attempt failed, and the job runs again."""
    extra = {"attempt": job.attempt, "wait_s": round(wait_s, 3), "code": code}
    log.info("attempt failed, trying again", extra=_ids(job) | extra)


def defect(job: Job, doing: str, error: Exception) -> None:
    """A defect of ours ends this job. Its own words come at DEBUG only: they may quote the prompt."""
    log.error("%s failed with %s", doing, type(error).__name__, extra=_ids(job))
    log.debug("where", exc_info=error)


def rejected(rejection: Rejection) -> None:
    """A record is no job: it has a place, and no id."""
    row = rejection.row
    place = {"topic": row.src_topic, "partition": row.src_partition, "offset": row.src_offset}
    log.info("record rejected", extra={"batch_id": row.batch_id, **place, **_code(row.code)})


def _ids(job: Job) -> dict[str, Any]:
    return {"job_id": str(job.row.id), "batch_id": job.row.batch_id, "tier": job.tier}


def _code(code: str | None) -> dict[str, str]:
    return {} if code is None else {"code": known_code(code)}
