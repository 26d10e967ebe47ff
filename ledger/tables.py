"""The tables, as SQLAlchemy metadata. docs/ledger.md explains them; migrations/ makes them.

`jobs`, `results` and `attempts` are partitioned by day on the id, which sorts by time (see `partitions`). State is a
smallint (JobState.code) without an index, and no indexed column ever changes, so that updates stay heap-only. One index
is on a partition alone and not here: that of `jobs_named` by `submitted_at`, for what forgets them.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={"pk": "%(table_name)s_pkey", "ix": "%(table_name)s_%(column_0_N_name)s_idx"}
)

_BY_ID = "RANGE (id)"


def _time(name: str, *, nullable: bool = True) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


def _now(name: str) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=text("now()"))


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid),
    Column("tenant", Text, nullable=False),
    Column("job_id", Text, comment="as the producer wrote it; null where it named none"),
    Column("batch_id", Text),
    Column("custom_id", Text),
    Column("pool", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("model", Text),
    Column("content_sha", LargeBinary, nullable=False),
    Column("src_topic", Text, nullable=False),
    Column("src_partition", Integer, nullable=False),
    Column("src_offset", BigInteger, nullable=False),
    Column("state", SmallInteger, nullable=False, comment="JobState.code; the view job_status spells it out"),
    Column("run", Integer, nullable=False),
    Column("attempt", Integer, nullable=False, comment="the latest of this run; 0: never started"),
    _time("deadline"),
    _time("submitted_at", nullable=False),
    _time("finished_at"),
    _count("prompt_tokens"),
    _count("cached_tokens"),
    _count("completion_tokens"),
    Column("error_code", Text),
    PrimaryKeyConstraint("id"),
    # The id comes last so that a batch can be read in pages, in order.
    Index(None, "tenant", "batch_id", "id", postgresql_where=text("batch_id IS NOT NULL")),
    postgresql_partition_by=_BY_ID,
)

results = Table(
    "results",
    metadata,
    Column("id", Uuid),
    Column("run", Integer),
    Column("body", JSONB, nullable=False, comment="the JobResult"),
    Column("uri", Text, comment="where an answer too large for the body is kept"),
    Column("bytes", BigInteger),
    Column("sha256", LargeBinary),
    Column("error", Text, comment="the message that goes with jobs.error_code"),
    PrimaryKeyConstraint("id", "run"),
    postgresql_partition_by=_BY_ID,
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Uuid),
    Column("run", Integer),
    Column("attempt", Integer),
    Column("worker", Text, nullable=False),
    Column("group_size", Integer, nullable=False, comment="0: ordinary; else suspects that ran together"),
    _now("started_at"),
    _time("ended_at"),
    Column("died", Boolean, nullable=False, server_default=text("false"), comment="its engine died under it"),
    Column(
        "failed",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="it failed by what may pass: the job is tried again",
    ),
    PrimaryKeyConstraint("id", "run", "attempt"),
    postgresql_partition_by=_BY_ID,
)

workers = Table(
    "workers",
    metadata,
    Column("worker", Text, comment="unique to one life of one process"),
    Column("pool", Text, nullable=False),
    Column("model", Text, nullable=False),
    _now("started_at"),
    _time("alive_until", nullable=False),
    PrimaryKeyConstraint("worker"),
)

batches = Table(
    "batches",
    metadata,
    Column("tenant", Text),
    Column("batch_id", Text),
    Column("expected", BigInteger, comment="records the producer sent; known once closed"),
    _time("opened_at"),
    _time("closed_at"),
    _time("expires_at"),
    Column("input_ref", Text),
    Column("metadata", JSONB),
    Column(
        "said_at",
        DateTime(timezone=True),
        nullable=False,
        server_default=text("now()"),
        comment="when it was last heard of, by the database's clock",
    ),
    Column("submission", Text, comment="the sending that it expects its records of, where that has a name"),
    PrimaryKeyConstraint("tenant", "batch_id"),
    Index(None, "said_at"),
)

batch_counts = Table(
    "batch_counts",
    metadata,
    Column("tenant", Text),
    Column("batch_id", Text),
    Column("shard", SmallInteger, autoincrement=False, comment="spreads writers; sum over it"),
    _count("submitted"),
    _count("running"),
    _count("succeeded"),
    _count("failed"),
    _count("cancelled"),
    _count("expired"),
    _count("rejected"),
    _count("prompt_tokens"),
    _count("cached_tokens"),
    _count("completion_tokens"),
    PrimaryKeyConstraint("tenant", "batch_id", "shard"),
)

tier_counts = Table(
    "tier_counts",
    metadata,
    Column("pool", Text),
    Column("tier", Text),
    Column("minute", DateTime(timezone=True), comment="in which the jobs were submitted"),
    Column("shard", SmallInteger, autoincrement=False),
    _count("submitted"),
    _count("running"),
    _count("finished"),
    PrimaryKeyConstraint("pool", "tier", "minute", "shard"),
)

cancels = Table(
    "cancels",
    metadata,
    Column("tenant", Text),
    Column("kind", Text, comment="job or batch"),
    Column("target", Text, comment="the job's id, or the batch id"),
    _now("asked_at"),
    PrimaryKeyConstraint("tenant", "kind", "target"),
)

rejections = Table(
    "rejections",
    metadata,
    Column("src_topic", Text),
    Column("src_partition", Integer, autoincrement=False),
    Column("src_offset", BigInteger, autoincrement=False),
    Column("tenant", Text, nullable=False),
    Column("batch_id", Text),
    Column("custom_id", Text),
    Column("code", Text, nullable=False),
    Column("message", Text, nullable=False),
    _now("rejected_at"),
    Column("run", Integer, nullable=False, server_default=text("1")),
    Column(
        "reopened",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="its record was sent again, for this run: it does not count",
    ),
    Column("submission", Text, comment="which sending of its batch the record is of, where it says so"),
    Column(
        "same_batch",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="of a duplicate: the job that came first is of this batch, and ends in it",
    ),
    PrimaryKeyConstraint("src_topic", "src_partition", "src_offset"),
    Index(None, "tenant", "batch_id"),
    # What `batch_progress` counts, and all of it: whoever follows a batch of many bad lines looks twice a second, and reads
    # no rows for it.
    Index(
        None,
        "tenant",
        "batch_id",
        "submission",
        postgresql_include=["same_batch"],
        postgresql_where=text("submission IS NOT NULL AND NOT reopened"),
    ),
)

settled_letters = Table(
    "settled_letters",
    metadata,
    Column("topic", Text),
    Column("partition", Integer, autoincrement=False),
    Column("offset", BigInteger, autoincrement=False),
    Column(
        "written_at", DateTime(timezone=True), comment="a topic made again has other letters in its places"
    ),
    Column("how", Text, nullable=False, comment="replayed or dropped"),
    _now("settled_at"),
    PrimaryKeyConstraint("topic", "partition", "offset", "written_at"),
)
