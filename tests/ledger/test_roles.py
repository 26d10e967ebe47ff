"""deploy/roles.sql: each process can do its work with the rights it is given there, and nothing beyond."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pipeline
import psycopg
import pytest
from pipeline import Pipeline
from recorders import running
from rows import attempt, job, named, outcome, rejection
from sqlalchemy.engine import make_url
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.exits import Exit
from headrace.ledger import Ledger, check
from headrace.ledger.errors import NotPermitted
from headrace.ledger.recorder import Recorder
from headrace.ledger.rows import Letter
from headrace.ledger.tables import metadata
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, uuid7

ROLES = Path(__file__).parents[2] / "deploy/roles.sql"
NAMES = ("worker", "recorder", "analyst")


@pytest.fixture
def logins(database_url: str) -> Iterator[dict[str, str]]:
    """The database's address for a login in each role."""
    with psycopg.connect(database_url, autocommit=True) as owner:
        for _ in range(2):  # a second time does no harm
            owner.execute(ROLES.read_text())
        for name in NAMES:
            owner.execute(f"CREATE ROLE test_{name} LOGIN PASSWORD 'x' IN ROLE headrace_{name}")
        url = make_url(database_url)
        try:
            yield {
                name: url.set(username=f"test_{name}", password="x").render_as_string(hide_password=False)
                for name in NAMES
            }
        finally:
            for role in [f"{kind}_{name}" for name in NAMES for kind in ("test", "headrace")]:
                owner.execute(f"DROP OWNED BY {role} CASCADE")
                owner.execute(f"DROP ROLE {role}")


def days_ago(days: int) -> UUID:
    return uuid7(int((datetime.now(UTC) - timedelta(days=days)).timestamp() * 1000))


def test_every_table_is_granted_to_somebody_and_read_by_the_analyst(
    logins: dict[str, str], database_url: str
) -> None:
    with psycopg.connect(database_url) as owner:
        for table in metadata.tables:
            right = "SELECT has_any_column_privilege(%s, %s, 'SELECT')"
            assert owner.execute(right, ("test_analyst", table)).fetchone() == (True,), table
            writers = [
                name
                for name in ("worker", "recorder")
                if owner.execute(
                    "SELECT has_table_privilege(%s, %s, 'INSERT')", (f"test_{name}", table)
                ).fetchone()
                == (True,)
            ]
            assert writers, table


@contextmanager
def recording(line: Pipeline, url: str) -> Iterator[None]:
    with Ledger(url) as ledger, running(Recorder(line.bootstrap, line.topics, ledger)):
        yield


def test_recorder_and_worker_run_under_their_roles_and_the_analyst_sees_it(
    kafka: str, database_url: str, logins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline.pipeline(kafka, database_url) as line:
        worker = replace(line, database_url=logins["worker"])
        worker.start_worker()
        old = days_ago(20)
        line.send(
            {"job_id": str(old), "prompt": "x"}
        )  # a day that nobody has made yet, and a worker meets first
        line.wait_terminal(1)
        with recording(line, logins["recorder"]):
            line.control(BatchOpened(batch_id="b"))
            for _ in range(10):
                line.submit("hello", batch_id="b")
            line.submit("fail:no_good", batch_id="b")
            line.submit("flaky:1")
            line.submit("die")
            line.send({"job_id": "mine", "prompt": "x", "batch_id": "b"})
            line.send(b"{no json")
            line.control(BatchClosed(batch_id="b", expected=12))
            line.control(CancelBatch(batch_id="c"))
            line.submit("slow:1000000", batch_id="c")
            line.wait_terminal(16)
            line.dead_letters(2)
            line.wait_for(
                lambda: line.query("SELECT state FROM batch_progress WHERE batch_id = 'b'") == [("complete",)]
            )
        for running in line.workers:
            running.close()
        worker.ledger.close()

    monkeypatch.setenv("DATABASE_URL", logins["analyst"])
    shown = CliRunner().invoke(app, ["status", "b", "--json"])
    assert (shown.exit_code, '"succeeded":11' in shown.stdout.replace(" ", "")) == (0, True), shown.output
    assert (
        CliRunner().invoke(app, ["results", "b"]).exit_code == Exit.REFUSED
    )  # answers are not for everybody
    with psycopg.connect(logins["analyst"]) as analyst:
        codes = analyst.execute(
            "SELECT error_code FROM job_status WHERE state = 'failed' ORDER BY 1"
        ).fetchall()
        assert codes == [("engine_failure",), ("no_good",)]
        assert analyst.execute("SELECT count(*) FROM rejections").fetchone() == (1,)
        assert analyst.execute("SELECT state FROM job_status WHERE id = %s", (old,)).fetchone() == (
            "succeeded",
        )
        assert analyst.execute("SELECT * FROM tier_backlog").fetchall()
        assert analyst.execute("SELECT count(*) FROM results WHERE error IS NOT NULL").fetchone() == (3,)


def test_what_a_pipeline_seldom_does_is_permitted_too(logins: dict[str, str], database_url: str) -> None:
    with Ledger(logins["worker"]) as worker, Ledger(logins["recorder"]) as recorder:
        over, live, letter = job(id=days_ago(10)), job(), Letter("t", 0, 0, datetime.now(UTC))
        worker.begin([attempt(over), attempt(named("n"))])
        worker.finish([outcome(over), outcome(named("n"))])
        worker.begin([attempt(live)])
        worker.end_attempts("w1", [live.id], died=True)
        bad = rejection()
        worker.reject([bad])
        assert worker.reopen([replace(over, run=2)]) == 1
        worker.finish([outcome(over, run=2)])
        worker.leave("w1")
        assert recorder.reopen([replace(bad, run=2)]) == 1
        recorder.settle([letter], "dropped")
        recorder.settle([letter], "replayed")
        assert recorder.settled("t") == {letter: "replayed"}
        recorder.drain()
        assert recorder.ensure_partitions(days_ahead=9) == 2
        recorder.apply_control([BatchClosed(tenant="acme", batch_id="over", expected=0)])
        with psycopg.connect(database_url) as owner:
            owner.execute("UPDATE batches SET said_at = now() - interval '9 days'")
        assert len(recorder.retire(timedelta(days=5))) == 1
        assert recorder.batch("acme", "over") is None
        assert recorder.job(over.id) is None
        assert list(recorder.results("acme", "b1")) is not None
        assert recorder.backlog()
    for url in logins.values():
        assert check(url) == []


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        ("worker", "DROP TABLE jobs"),
        ("worker", "ALTER TABLE jobs ADD COLUMN x int"),
        ("worker", "TRUNCATE results"),
        ("worker", "DELETE FROM jobs"),
        ("worker", "UPDATE results SET body = '{}'"),
        ("worker", "CREATE TABLE mine (x int)"),
        ("worker", "SELECT drop_day(DATE '2020-01-01')"),
        ("worker", "INSERT INTO cancels VALUES ('acme', 'job', 'x')"),
        ("recorder", "DROP TABLE jobs_named"),
        ("recorder", "INSERT INTO results (id, run, body) SELECT id, run, '{}' FROM jobs"),
        ("recorder", "DELETE FROM jobs"),
        ("analyst", "INSERT INTO cancels VALUES ('acme', 'job', 'x')"),
        ("analyst", "UPDATE jobs SET state = 2"),
        ("analyst", "SELECT body FROM results"),
        ("analyst", "SELECT make_day(current_date)"),
    ],
)
def test_nobody_may_do_more(role: str, statement: str, logins: dict[str, str]) -> None:
    with psycopg.connect(logins[role]) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement)


def test_not_even_the_functions_make_or_drop_days_that_nobody_should(logins: dict[str, str]) -> None:
    with psycopg.connect(logins["recorder"], autocommit=True) as recorder:
        for call in (
            "make_day(current_date + 400)",
            "make_day(DATE '1999-01-01')",
            "drop_day(current_date + 1)",
        ):
            with pytest.raises(psycopg.errors.RaiseException):
                recorder.execute(f"SELECT {call}")


def test_a_right_that_lacks_is_told_with_the_remedy(logins: dict[str, str]) -> None:
    with Ledger(logins["analyst"]) as ledger, pytest.raises(NotPermitted, match=r"deploy/roles\.sql"):
        ledger.heartbeat("w", "default", "m", ttl=1)
