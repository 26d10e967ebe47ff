"""Tell failed attempts from those given back: only failures count against how often a job is tried again.

Revision: 0011 (after 0010)
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "attempts",
        sa.Column(
            "failed",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("false"),
            comment="it failed by what may pass: the job is tried again",
        ),
    )


def downgrade() -> None:
    op.drop_column("attempts", "failed")
