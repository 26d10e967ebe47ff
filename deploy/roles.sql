-- What each process may do in the job table, and no more: three roles without a login.
--
-- Run it as the owner of the tables (the role that `headrace migrate` logs in as; it needs CREATEROLE), in the database,
-- after each `headrace migrate`; running it again does no harm:
--
--     psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f deploy/roles.sql
--
-- Then give each process a login that is in its role:
--
--     CREATE ROLE worker LOGIN PASSWORD '...' IN ROLE headrace_worker;
--
-- None of them owns anything, so none can drop, alter or truncate. Day partitions are made and dropped by two functions
-- that run as the owner (make_day, drop_day); they need no grants of their own, since rights are asked of the table
-- that a statement names, and that is never a partition.

BEGIN;

DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['headrace_worker', 'headrace_recorder', 'headrace_analyst'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', role);
        END IF;
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA public FROM %I', role);
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), role);
        EXECUTE format('GRANT USAGE ON SCHEMA public TO %I', role);
    END LOOP;
    -- Rows go in by way of a temporary table.
    EXECUTE format('GRANT TEMPORARY ON DATABASE %I TO headrace_worker, headrace_recorder', current_database());
END
$$;

-- Before Postgres 15 everybody may create tables here.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;

-- Workers: begin and end jobs, keep results, say that they live. What is old they leave alone.
GRANT SELECT, INSERT, UPDATE ON jobs, attempts, workers, batch_counts, tier_counts, rejections TO headrace_worker;
GRANT SELECT, INSERT ON results, batches TO headrace_worker;
GRANT SELECT ON cancels, alembic_version TO headrace_worker;
GRANT EXECUTE ON FUNCTION make_day(date) TO headrace_worker;

-- The recorder: enter jobs, batches and cancels, and forget what is old. `headrace retry` and `headrace dlq` log in with
-- this role too.
GRANT SELECT, INSERT, UPDATE ON jobs, batches, batch_counts, tier_counts, rejections TO headrace_recorder;
GRANT SELECT, INSERT ON cancels, settled_letters TO headrace_recorder;
GRANT SELECT ON results, attempts, workers, alembic_version TO headrace_recorder;
GRANT DELETE ON batches, batch_counts, workers, cancels, rejections, settled_letters, tier_counts TO headrace_recorder;
GRANT SELECT, UPDATE, DELETE ON jobs_named, results_named, attempts_named TO headrace_recorder;
GRANT EXECUTE ON FUNCTION make_day(date), drop_day(date) TO headrace_recorder;

-- Analysts: read everything but the answers. `GRANT SELECT ON results TO ...` lets somebody read those as well.
GRANT SELECT ON jobs, attempts, workers, batches, batch_counts, tier_counts, cancels, rejections, settled_letters,
    alembic_version TO headrace_analyst;
GRANT SELECT (id, run, uri, bytes, sha256, error) ON results TO headrace_analyst;

GRANT SELECT ON job_status, batch_progress, tier_backlog TO headrace_worker, headrace_recorder, headrace_analyst;

COMMIT;
