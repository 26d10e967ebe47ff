"""The views that analysts read, as SQL. docs/ledger.md shows each with a query and its answer."""

from headrace.schemas import JobState

STATE_NAME = "CASE state " + " ".join(f"WHEN {s.code} THEN '{s}'" for s in JobState) + " END"

JOB_STATUS = f"""
SELECT jobs.id, tenant, job_id, batch_id, custom_id, pool, tier, model,
       {STATE_NAME} AS state,
       jobs.run, attempt, deadline, submitted_at, finished_at,
       prompt_tokens, cached_tokens, completion_tokens, error_code, results.error
FROM jobs LEFT JOIN results ON results.id = jobs.id AND results.run = jobs.run
"""

# A batch waits for each of its jobs, also where its producer has said fewer so far (a file that has grown and is sent
# again), or where records beyond the count were rejected (a file that has changed and is sent again).
#
# Rejected records of another sending than the one that its count is of stand for nothing: each line was sent again
# (`earlier`). Those of a line whose job is there with other content are shown, but that job is how the line ends (`changed`).
# Both need a look at the rejections themselves, of which most batches have none.
#
# A batch that nothing closed can be no more than `cancelled`: how much is still to come is not known.
#
# Whatever counts something against a batch also makes sure that it has a row in `batches` (see `counters`).
BATCH_PROGRESS = """
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

TIER_BACKLOG = """
WITH minutes AS (
    SELECT pool, tier, minute,
           sum(submitted - running - finished)::bigint AS queued, sum(running)::bigint AS running
    FROM tier_counts GROUP BY pool, tier, minute
)
SELECT pool, tier, sum(queued)::bigint AS queued, sum(running)::bigint AS running,
       min(minute) FILTER (WHERE queued > 0) AS oldest
FROM minutes GROUP BY pool, tier
"""

VIEWS = {"job_status": JOB_STATUS, "batch_progress": BATCH_PROGRESS, "tier_backlog": TIER_BACKLOG}
