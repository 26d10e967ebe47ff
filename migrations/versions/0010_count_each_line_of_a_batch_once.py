"""Count each line of a batch once, however often it was sent, and let one that was cancelled unclosed be cancelled.

Revision: 0010 (after 0009)
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_BEFORE = """
SELECT b.tenant, b.batch_id,
       CASE WHEN b.closed_at IS NOT NULL AND c.terminal + c.rejected >= b.expected
                 AND c.submitted = c.terminal THEN 'complete'
            WHEN EXISTS (SELECT FROM cancels x
                         WHERE x.tenant = b.tenant AND x.kind = 'batch' AND x.target = b.batch_id) THEN 'cancelling'
            WHEN b.closed_at IS NOT NULL THEN 'closed'
            ELSE 'open' END AS state,
       b.expected, c.submitted, c.submitted - c.running - c.terminal AS queued, c.running,
       c.succeeded, c.failed, c.cancelled, c.expired, c.rejected,
       c.prompt_tokens, c.cached_tokens, c.completion_tokens,
       b.opened_at, b.closed_at
FROM batches b CROSS JOIN LATERAL (
    SELECT coalesce(sum(submitted), 0)::bigint AS submitted, coalesce(sum(running), 0)::bigint AS running,
           coalesce(sum(succeeded), 0)::bigint AS succeeded, coalesce(sum(failed), 0)::bigint AS failed,
           coalesce(sum(cancelled), 0)::bigint AS cancelled, coalesce(sum(expired), 0)::bigint AS expired,
           coalesce(sum(succeeded + failed + cancelled + expired), 0)::bigint AS terminal,
           coalesce(sum(rejected), 0)::bigint AS rejected,
           coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
           coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
           coalesce(sum(completion_tokens), 0)::bigint AS completion_tokens
    FROM batch_counts WHERE tenant = b.tenant AND batch_id = b.batch_id
) c
"""

_AFTER = """
SELECT b.tenant, b.batch_id,
       CASE WHEN b.closed_at IS NOT NULL AND c.terminal + c.rejected - r.earlier - r.changed >= b.expected
                 AND c.submitted = c.terminal THEN 'complete'
            WHEN EXISTS (SELECT FROM cancels x
                         WHERE x.tenant = b.tenant AND x.kind = 'batch' AND x.target = b.batch_id)
            THEN CASE WHEN b.closed_at IS NULL AND c.submitted = c.terminal THEN 'cancelled' ELSE 'cancelling' END
            WHEN b.closed_at IS NOT NULL THEN 'closed'
            ELSE 'open' END AS state,
       b.expected, c.submitted, c.submitted - c.running - c.terminal AS queued, c.running,
       c.succeeded, c.failed, c.cancelled, c.expired, c.rejected - r.earlier AS rejected,
       c.prompt_tokens, c.cached_tokens, c.completion_tokens,
       b.opened_at, b.closed_at
FROM batches b CROSS JOIN LATERAL (
    SELECT coalesce(sum(submitted), 0)::bigint AS submitted, coalesce(sum(running), 0)::bigint AS running,
           coalesce(sum(succeeded), 0)::bigint AS succeeded, coalesce(sum(failed), 0)::bigint AS failed,
           coalesce(sum(cancelled), 0)::bigint AS cancelled, coalesce(sum(expired), 0)::bigint AS expired,
           coalesce(sum(succeeded + failed + cancelled + expired), 0)::bigint AS terminal,
           coalesce(sum(rejected), 0)::bigint AS rejected,
           coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
           coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
           coalesce(sum(completion_tokens), 0)::bigint AS completion_tokens
    FROM batch_counts WHERE tenant = b.tenant AND batch_id = b.batch_id
) c CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE submission <> b.submission) AS earlier,
           count(*) FILTER (WHERE same_batch AND (submission = b.submission) IS NOT FALSE) AS changed
    FROM rejections
    WHERE c.rejected > 0 AND tenant = b.tenant AND batch_id = b.batch_id AND submission IS NOT NULL AND NOT reopened
) r
"""


def upgrade() -> None:
    op.add_column(
        "batches",
        sa.Column(
            "submission",
            sa.Text,
            comment="the sending that it expects its records of, where that has a name",
        ),
    )
    op.add_column(
        "rejections",
        sa.Column(
            "submission", sa.Text, comment="which sending of its batch the record is of, where it says so"
        ),
    )
    op.add_column(
        "rejections",
        sa.Column(
            "same_batch",
            sa.Boolean,
            nullable=False,
            server_default=sa.text("false"),
            comment="of a duplicate: the job that came first is of this batch, and ends in it",
        ),
    )
    op.create_index(
        "rejections_tenant_batch_id_submission_idx",
        "rejections",
        ["tenant", "batch_id", "submission"],
        postgresql_include=["same_batch"],
        postgresql_where=sa.text("submission IS NOT NULL AND NOT reopened"),
    )
    op.execute(f"CREATE OR REPLACE VIEW batch_progress AS {_AFTER}")


def downgrade() -> None:
    op.execute(f"CREATE OR REPLACE VIEW batch_progress AS {_BEFORE}")
    op.drop_index("rejections_tenant_batch_id_submission_idx", "rejections")
    op.drop_column("rejections", "same_batch")
    op.drop_column("rejections", "submission")
    op.drop_column("batches", "submission")
