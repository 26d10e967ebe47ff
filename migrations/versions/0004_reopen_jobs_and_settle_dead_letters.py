"""Let rejections be taken back for another run, and note which dead letters have been dealt with.

Revision: 0004 (after 0003)
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rejections", sa.Column("run", sa.Integer, nullable=False, server_default=sa.text("1")))
    op.add_column(
        "rejections",
        sa.Column(
            "reopened",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("false"),
            comment="its record was sent again, for this run: it does not count",
        ),
    )
    op.create_table(
        "settled_letters",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column(
            "written_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="a topic made again has other letters in its places",
        ),
        sa.Column("how", sa.Text, nullable=False, comment="replayed or dropped"),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("topic", "partition", "offset", "written_at", name="settled_letters_pkey"),
    )


def downgrade() -> None:
    op.drop_table("settled_letters")
    op.drop_column("rejections", "reopened")
    op.drop_column("rejections", "run")
