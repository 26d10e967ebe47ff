"""Let roles that own nothing make and drop day partitions, and nothing else: two functions that run as the owner.

Revision: 0005 (after 0004)
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# ids of a day begin with its milliseconds: see ledger/partitions.py.
FIRST_ID = """
CREATE FUNCTION first_id(day date) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (lpad(to_hex((day - DATE '1970-01-01')::bigint * 86400000), 12, '0') || repeat('0', 20))::uuid
"""

# Two recorders may think of a day at the same moment, so the second looks again behind the lock. ATTACH locks writers
# out of nothing; CREATE .. PARTITION OF would wait for every transaction on the table. jobs comes last: who finds its
# partition finds the others'.
MAKE_DAY = """
CREATE FUNCTION make_day(day date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    suffix text := to_char(day, 'YYYYMMDD');
    parent text;
    today date := (now() AT TIME ZONE 'UTC')::date;
BEGIN
    IF day NOT BETWEEN today - 62 AND today + 62 THEN
        RAISE EXCEPTION 'no partition is made for a day as far away as %', day;
    END IF;
    PERFORM pg_advisory_xact_lock(1885434484);
    IF EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'jobs'::regclass AND inhrelid = to_regclass('jobs_' || suffix)) THEN
        RETURN false;
    END IF;
    FOREACH parent IN ARRAY ARRAY['attempts', 'results', 'jobs'] LOOP
        EXECUTE format('CREATE TABLE IF NOT EXISTS %I (LIKE %I INCLUDING ALL) WITH (fillfactor = %s)',
                       parent || '_' || suffix, parent, CASE parent WHEN 'results' THEN 100 ELSE 50 END);
        EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                       parent, parent || '_' || suffix, first_id(day), first_id(day + 1));
    END LOOP;
    RETURN true;
END
$$
"""

# Everybody waits behind us while we wait for the writers of the moment: rather fail, and try in an hour.
DROP_DAY = """
CREATE FUNCTION drop_day(day date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    parent text;
BEGIN
    IF day >= (now() AT TIME ZONE 'UTC')::date THEN
        RAISE EXCEPTION 'the partitions of % are not over', day;
    END IF;
    PERFORM set_config('lock_timeout', '2s', true);
    LOCK TABLE ONLY jobs, ONLY results, ONLY attempts IN ACCESS EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM jobs WHERE id >= first_id(day) AND id < first_id(day + 1) AND state < 2) THEN
        RETURN false;
    END IF;
    FOREACH parent IN ARRAY ARRAY['jobs', 'results', 'attempts'] LOOP
        EXECUTE format('DROP TABLE %I', parent || '_' || to_char(day, 'YYYYMMDD'));
    END LOOP;
    RETURN true;
END
$$
"""


def upgrade() -> None:
    schema = op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    op.execute(sa.text(FIRST_ID))
    for function in (MAKE_DAY, DROP_DAY):
        op.get_bind().exec_driver_sql(function.format(schema=schema).replace("%", "%%"))
    op.execute("REVOKE EXECUTE ON FUNCTION make_day(date), drop_day(date) FROM PUBLIC")


def downgrade() -> None:
    for function in ("drop_day", "make_day", "first_id"):
        op.execute(f"DROP FUNCTION {function}(date)")
