"""Let a batch wait for each of its jobs: rejected records of a changed file, sent again, must not stand for them.

Revision: 0008 (after 0007)
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_ALL_ENDED = "c.submitted = c.terminal"
_ALL_BEYOND_THE_COUNT_ENDED = "(c.submitted <= b.expected OR c.submitted = c.terminal)"

_BATCH_PROGRESS = """
SELECT b.tenant, b.batch_id,
       CASE WHEN b.closed_at IS NOT NULL AND c.terminal + c.rejected >= b.expected
                 AND {ended} THEN 'complete'
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


def upgrade() -> None:
    op.execute(f"CREATE OR REPLACE VIEW batch_progress AS {_BATCH_PROGRESS.format(ended=_ALL_ENDED)}")


def downgrade() -> None:
    op.execute(
        f"CREATE OR REPLACE VIEW batch_progress AS {_BATCH_PROGRESS.format(ended=_ALL_BEYOND_THE_COUNT_ENDED)}"
    )
