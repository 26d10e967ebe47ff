"""Rows on their way in: COPY into a temporary table, one for each session, emptied at each commit; few go as arrays.

Each set of rows is one statement. A statement a row would be a round trip a row, or (executemany) a pipeline: a client
that is stopped in the middle of one keeps its locks for as long as it sleeps, since between a pipeline's messages no
timeout runs but Postgres 17's transaction_timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from headrace.ledger.database import Rows
from headrace.ledger.errors import RowRefused
from headrace.ledger.partitions import span, within
from headrace.ledger.rows import JobRow

R = TypeVar("R")
T = TypeVar("T")

CREATE = """
CREATE TEMP TABLE IF NOT EXISTS incoming
    (LIKE jobs INCLUDING DEFAULTS, worker text, group_size int, body jsonb, error text, uri text, bytes bigint,
     sha256 bytea)
    ON COMMIT DELETE ROWS
"""

JOB_COLUMNS = (
    "id",
    "tenant",
    "job_id",
    "batch_id",
    "custom_id",
    "pool",
    "tier",
    "model",
    "content_sha",
    "src_topic",
    "src_partition",
    "src_offset",
    "deadline",
    "submitted_at",
    "state",
    "run",
    "attempt",
)


def insert_absent(also: Mapping[str, str] | None = None) -> str:
    """INSERT of the staged rows whose id has none yet; `also` maps further columns to where they come from.

    In id order, as every statement here, and in a transaction that has locked no row before: an INSERT also waits for
    rows that somebody changes, so whoever had locked one with a higher id would be waited for and wait in a circle.
    What changes rows therefore comes first, in a transaction of its own, and then what found none comes here.
    """
    also = also or {}
    return (
        f"INSERT INTO jobs ({', '.join([*JOB_COLUMNS, *also])})"
        f" SELECT {', '.join([*JOB_COLUMNS, *also.values()])} FROM incoming ORDER BY id ON CONFLICT DO NOTHING"
    )


OUTCOME_COLUMNS = ("prompt_tokens", "cached_tokens", "completion_tokens", "error_code")


# Joined to an UPDATE of jobs, it locks their rows in id order first: a join of the planner's choice may visit them in
# any order, and two writers of the same jobs would then deadlock. It costs 2 of some 30 microseconds a row. Bodies
# stay out of it: they would not be sorted in memory.
LOCKED = f"""(
    SELECT {", ".join(f"incoming.{name}" for name in ("id", "run", "content_sha", "state", "attempt", *OUTCOME_COLUMNS))}
    FROM incoming JOIN jobs ON jobs.id = incoming.id AND {within("jobs")}
    ORDER BY incoming.id FOR NO KEY UPDATE OF jobs
)"""


def job_values(job: JobRow, state: int, run: int, attempt: int) -> tuple[Any, ...]:
    """The values of JOB_COLUMNS."""
    return (
        job.id,
        job.tenant,
        job.job_id,
        job.batch_id,
        job.custom_id,
        job.pool,
        job.tier,
        job.model,
        job.content_sha,
        job.src_topic,
        job.src_partition,
        job.src_offset,
        job.deadline,
        job.submitted_at,
        state,
        run,
        attempt,
    )


def stage(cursor: Rows, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> dict[str, UUID]:
    """Fill `incoming`, in id order; return the parameters of `within`. The id comes first in each row."""
    cursor.execute(CREATE)
    in_order = sorted(rows, key=_id)
    with cursor.copy(f"COPY incoming ({', '.join(columns)}) FROM STDIN") as copy:
        for row in in_order:
            copy.write_row(row)
    return span(row[0] for row in (in_order[0], in_order[-1]))


def columns(rows: Iterable[Sequence[object]]) -> list[list[object]]:
    """The rows as an array for each column, for unnest. There must be rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def _id(row: tuple[Any, ...]) -> int:
    id: UUID = row[0]
    return id.int


def first_by(key: Callable[[R], Hashable], rows: Iterable[R]) -> list[R]:
    """The rows, each key once: one statement must not meet the same key twice."""
    unique: dict[Hashable, R] = {}
    for row in rows:
        unique.setdefault(key(row), row)
    return list(unique.values())


def bisect(write: Callable[[Sequence[R]], T], rows: Sequence[R], refused: Callable[[R, str], T]) -> list[T]:
    """Write all rows at once; where Postgres refuses one, each half by itself, down to the row at fault.

    The others land. One bad row among n costs about 2 log n more transactions.
    """
    if not rows:
        return []
    try:
        return [write(rows)]
    except RowRefused as error:
        if len(rows) == 1:
            return [refused(rows[0], str(error))]
    middle = len(rows) // 2
    return bisect(write, rows[:middle], refused) + bisect(write, rows[middle:], refused)
