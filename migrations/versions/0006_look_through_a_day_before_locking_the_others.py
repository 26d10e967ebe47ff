"""Look through a day before anybody else has to wait for its end, and let two recorders try to drop the same one.

Revision: 0006 (after 0005)
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_HEAD = """
CREATE OR REPLACE FUNCTION drop_day(day date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    suffix text := to_char(day, 'YYYYMMDD');
    parent text;
    live boolean;
BEGIN
    IF day >= (now() AT TIME ZONE 'UTC')::date THEN
        RAISE EXCEPTION 'the partitions of % are not over', day;
    END IF;
    PERFORM set_config('lock_timeout', '2s', true);
"""

_TAIL = """
    FOREACH parent IN ARRAY ARRAY['jobs', 'results', 'attempts'] LOOP
        EXECUTE format('DROP TABLE %I', parent || '_' || suffix);
    END LOOP;
    RETURN true;
END
$$
"""

# That a day holds no live job is known once all of it was read, which may take a while. Meanwhile only writers of that
# very day wait. The tables themselves are locked for the moment of the drop alone; everybody waits behind us while we
# wait for the writers of the moment, so rather fail, and try in an hour. A late writer of the day may deadlock with us,
# and is then either let in or tried again. Of two recorders one does it, and the other leaves it to that one without waiting.
AFTER = (
    _HEAD
    + """
    IF NOT pg_try_advisory_xact_lock(1885434485) THEN
        RETURN false;
    END IF;
    IF to_regclass('jobs_' || suffix) IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE %I IN SHARE MODE', 'jobs_' || suffix);
    EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE state < 2)', 'jobs_' || suffix) INTO live;
    IF live THEN
        RETURN false;
    END IF;
    LOCK TABLE ONLY jobs, ONLY results, ONLY attempts IN ACCESS EXCLUSIVE MODE;
"""
    + _TAIL
)

BEFORE = (
    _HEAD
    + """
    LOCK TABLE ONLY jobs, ONLY results, ONLY attempts IN ACCESS EXCLUSIVE MODE;
    SELECT EXISTS (SELECT FROM jobs WHERE id >= first_id(day) AND id < first_id(day + 1) AND state < 2) INTO live;
    IF live THEN
        RETURN false;
    END IF;
"""
    + _TAIL
)


def upgrade() -> None:
    _replace(AFTER)


def downgrade() -> None:
    _replace(BEFORE)


def _replace(function: str) -> None:
    schema = op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    op.get_bind().exec_driver_sql(function.format(schema=schema).replace("%", "%%"))
