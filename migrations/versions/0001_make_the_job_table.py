"""Make the job table: jobs with their results and attempts, partitioned by the day in the id.

Revision: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Ids that name no time (ff and a hash) lie behind every day.
CATCH_ALL_FROM = "ff000000-0000-0000-0000-000000000000"
# Rows of jobs and attempts are updated in place; half a page of room keeps those updates heap-only.
FILLFACTOR = {"jobs": 50, "attempts": 50, "results": 100}


def _time(name: str, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, comment="as the producer wrote it; null where it named none"),
        sa.Column("batch_id", sa.Text),
        sa.Column("custom_id", sa.Text),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("tier", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("content_sha", sa.LargeBinary, nullable=False),
        sa.Column("src_topic", sa.Text, nullable=False),
        sa.Column("src_partition", sa.Integer, nullable=False),
        sa.Column("src_offset", sa.BigInteger, nullable=False),
        sa.Column(
            "state",
            sa.SmallInteger,
            nullable=False,
            comment="JobState.code; the view job_status spells it out",
        ),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, comment="the latest of this run; 0: never started"),
        _time("deadline"),
        _time("submitted_at", nullable=False),
        _time("finished_at"),
        _count("prompt_tokens"),
        _count("cached_tokens"),
        _count("completion_tokens"),
        sa.Column("error_code", sa.Text),
        sa.PrimaryKeyConstraint("id", name="jobs_pkey"),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index(
        "jobs_tenant_batch_id_id_idx",
        "jobs",
        ["tenant", "batch_id", "id"],
        postgresql_where=sa.text("batch_id IS NOT NULL"),
    )
    op.create_table(
        "results",
        sa.Column("id", sa.Uuid, nullable=False),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("body", postgresql.JSONB, nullable=False, comment="the JobResult"),
        sa.Column("uri", sa.Text, comment="where an answer too large for the body is kept"),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("sha256", sa.LargeBinary),
        sa.Column("error", sa.Text, comment="the message that goes with jobs.error_code"),
        sa.PrimaryKeyConstraint("id", "run", name="results_pkey"),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Uuid, nullable=False),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column(
            "group_size", sa.Integer, nullable=False, comment="0: ordinary; else suspects that ran together"
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        _time("ended_at"),
        sa.Column(
            "died",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("false"),
            comment="its engine died under it",
        ),
        sa.PrimaryKeyConstraint("id", "run", "attempt", name="attempts_pkey"),
        postgresql_partition_by="RANGE (id)",
    )
    for table, fillfactor in FILLFACTOR.items():
        op.execute(
            f"CREATE TABLE {table}_named PARTITION OF {table} FOR VALUES FROM ('{CATCH_ALL_FROM}') TO (MAXVALUE) "
            f"WITH (fillfactor = {fillfactor})"
        )


def downgrade() -> None:
    for table in FILLFACTOR:
        op.drop_table(table)
