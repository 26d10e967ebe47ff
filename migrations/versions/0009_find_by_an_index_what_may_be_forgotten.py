"""Find batches and named jobs that may be forgotten by an index, and note when a batch was last heard of.

Revision: 0009 (after 0008)
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "batches",
        sa.Column(
            "said_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("now()"),
            comment="when it was last heard of, by the database's clock",
        ),
    )
    op.create_index("batches_said_at_idx", "batches", ["said_at"])
    # On this partition alone: days are dropped whole. Not BRIN: rows are deleted here, new ones take their pages, and a
    # range of pages never forgets the oldest time that it held. Who writes named jobs waits while it is built.
    op.create_index("jobs_named_submitted_at_idx", "jobs_named", ["submitted_at"])


def downgrade() -> None:
    op.drop_index("jobs_named_submitted_at_idx", "jobs_named")
    op.drop_index("batches_said_at_idx", "batches")
    op.drop_column("batches", "said_at")
