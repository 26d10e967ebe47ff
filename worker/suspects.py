"""Jobs that were in an engine or a worker when it died, twice or more: they run in groups set apart.

Whoever is merely near a death is suspected, so one suspicion changes nothing: a lost node costs no detour. A job
suspected again runs in a group apart from the unsuspected; when a group dies, its jobs come back in groups of half
the size. So among n jobs the one that kills engines stands alone after about log2(n) deaths, and only deaths alone
count against it. All that is needed to know is in the attempts' rows: it survives workers.
"""

from collections import defaultdict, deque

from headrace.ledger.rows import StoredJob
from headrace.worker.job import Job

SUSPICIONS_TO_SET_APART = 2
DEATHS_ALONE_ALLOWED = 2
LARGEST_GROUP = 64


def is_guilty(stored: StoredJob) -> bool:
    """Whether the job has killed enough engines all by itself."""
    return stored.deaths_alone >= DEATHS_ALONE_ALLOWED


def runs_apart(stored: StoredJob) -> bool:
    """Whether the job must not run beside unsuspected ones."""
    return stored.suspect >= SUSPICIONS_TO_SET_APART


class Suspects:
    """The jobs that wait for a run apart, by the size of group they may run in."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, deque[Job]] = defaultdict(deque)

    def put(self, job: Job, died_in_group_of: int) -> None:
        """``died_in_group_of``: the smallest group that died with it; 0 if it was in none."""
        size = max(1, died_in_group_of // 2) if died_in_group_of else LARGEST_GROUP
        self._waiting[size].append(job)

    def next_group(self) -> list[Job]:
        """Jobs to run together and with nobody else; the largest groups first, as they clear the most."""
        for size in sorted(self._waiting, reverse=True):
            queue = self._waiting[size]
            group: list[Job] = []
            while queue and len(group) < size:
                job = queue.popleft()
                if job.waiting:
                    group.append(job)
            if not queue:
                del self._waiting[size]
            if group:
                return group
        return []

    def __bool__(self) -> bool:
        return bool(self._waiting)
