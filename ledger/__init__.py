"""The job table: what was submitted, what runs, how each job ended. Postgres through SQLAlchemy and psycopg."""

from headrace.ledger.errors import LedgerError, LedgerUnavailable, NotMigrated, NotPostgres, RowRefused
from headrace.ledger.ledger import Ledger
from headrace.ledger.migrate import check, migrate, require_migrated
from headrace.ledger.rows import (
    AttemptRow,
    BatchProgress,
    BatchState,
    Begun,
    EndedJob,
    Finished,
    JobRow,
    JobStatus,
    Letter,
    OutcomeRow,
    RejectionRow,
    StoredJob,
    StoredResult,
    TierBacklog,
)

__all__ = [
    "AttemptRow",
    "BatchProgress",
    "BatchState",
    "Begun",
    "EndedJob",
    "Finished",
    "JobRow",
    "JobStatus",
    "Ledger",
    "LedgerError",
    "LedgerUnavailable",
    "Letter",
    "NotMigrated",
    "NotPostgres",
    "OutcomeRow",
    "RejectionRow",
    "RowRefused",
    "StoredJob",
    "StoredResult",
    "TierBacklog",
    "check",
    "migrate",
    "require_migrated",
]
