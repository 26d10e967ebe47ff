"""Count batches and tiers, and keep batches, cancels, rejections and the workers' heartbeats.

Revision: 0002 (after 0001)
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def _time(name: str, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _now(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()"))


def _counts(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0")) for name in names]


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("expected", sa.BigInteger, comment="records the producer sent; known once closed"),
        _time("opened_at"),
        _time("closed_at"),
        _time("expires_at"),
        sa.Column("input_ref", sa.Text),
        sa.Column("metadata", postgresql.JSONB),
        sa.PrimaryKeyConstraint("tenant", "batch_id", name="batches_pkey"),
    )
    op.create_table(
        "batch_counts",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("shard", sa.SmallInteger, nullable=False, comment="spreads writers; sum over it"),
        *_counts("submitted", "running", "succeeded", "failed", "cancelled", "expired", "rejected"),
        *_counts("prompt_tokens", "cached_tokens", "completion_tokens"),
        sa.PrimaryKeyConstraint("tenant", "batch_id", "shard", name="batch_counts_pkey"),
    )
    op.create_table(
        "tier_counts",
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("tier", sa.Text, nullable=False),
        sa.Column(
            "minute", sa.DateTime(timezone=True), nullable=False, comment="in which the jobs were submitted"
        ),
        sa.Column("shard", sa.SmallInteger, nullable=False),
        *_counts("submitted", "running", "finished"),
        sa.PrimaryKeyConstraint("pool", "tier", "minute", "shard", name="tier_counts_pkey"),
    )
    op.create_table(
        "cancels",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False, comment="job or batch"),
        sa.Column("target", sa.Text, nullable=False, comment="the job's id, or the batch id"),
        _now("asked_at"),
        sa.PrimaryKeyConstraint("tenant", "kind", "target", name="cancels_pkey"),
    )
    op.create_table(
        "rejections",
        sa.Column("src_topic", sa.Text, nullable=False),
        sa.Column("src_partition", sa.Integer, nullable=False),
        sa.Column("src_offset", sa.BigInteger, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("batch_id", sa.Text),
        sa.Column("custom_id", sa.Text),
        sa.Column("code", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        _now("rejected_at"),
        sa.PrimaryKeyConstraint("src_topic", "src_partition", "src_offset", name="rejections_pkey"),
    )
    op.create_index("rejections_tenant_batch_id_idx", "rejections", ["tenant", "batch_id"])
    op.create_table(
        "workers",
        sa.Column("worker", sa.Text, nullable=False, comment="unique to one life of one process"),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        _now("started_at"),
        _time("alive_until", nullable=False),
        sa.PrimaryKeyConstraint("worker", name="workers_pkey"),
    )


def downgrade() -> None:
    for table in ("workers", "rejections", "cancels", "tier_counts", "batch_counts", "batches"):
        op.drop_table(table)
