"""Commands on a real broker and a real Postgres. The job table is filled by hand: no worker is needed here."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import apache_kafka
import psycopg
import pytest
from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from sqlalchemy.engine import make_url
from typer.testing import CliRunner, Result
from waiting import eventually

from headrace.cli import app, context, doctor, waiting
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.stopping import Stop
from headrace.cli.submission import parse_deadline
from headrace.client import Client
from headrace.client.announced import Announced
from headrace.client.client import batch_named_by
from headrace.ledger import (
    AttemptRow,
    BatchProgress,
    BatchState,
    JobRow,
    Ledger,
    LedgerUnavailable,
    OutcomeRow,
    RejectionRow,
)
from headrace.schemas import (
    BatchClosed,
    BatchOpened,
    CancelBatch,
    Choice,
    JobError,
    JobResult,
    JobState,
    Source,
    parse_job,
    uuid7,
)
from headrace.settings import Settings
from headrace.worker.health import HealthServer, loading

Run = Callable[..., Result]


@pytest.fixture
def prefix() -> str:
    """Topics of one test's own."""
    return f"t{uuid4().hex[:8]}"


@pytest.fixture
def run(kafka: str, database_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("HEADRACE_TOPIC_PREFIX", prefix)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))

    def invoke(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=stdin)

    return invoke


@pytest.fixture
def topics(run: Run) -> None:
    assert run("topics", "create", "--partitions", "2").exit_code == 0


@pytest.fixture
def ended_batch(database_url: str) -> dict[str, UUID]:
    """A complete batch `b`: one job succeeded, one failed, one record rejected. Ids by custom id."""
    rows = {name: job_row(name, offset) for offset, name in enumerate(("good", "bad"))}
    answer = JobResult(
        id=rows["good"].id, batch_id="b", custom_id="good", model="m", state=JobState.SUCCEEDED,
        choices=[Choice(text="Paris", finish_reason="stop")],
    )  # fmt: skip
    error = JobResult(
        id=rows["bad"].id, batch_id="b", custom_id="bad", state=JobState.FAILED,
        error=JobError(code="invalid_type", message="temperature must be a number"),
    )  # fmt: skip
    with Ledger(database_url) as ledger:
        ledger.apply_control([BatchOpened(batch_id="b"), BatchClosed(batch_id="b", expected=3)])
        ledger.record(
            list(rows.values()),
            [RejectionRow("jobs", 0, 9, "default", "invalid_json", "not JSON", batch_id="b")],
        )
        ledger.finish(
            [
                OutcomeRow(rows["good"], JobState.SUCCEEDED, answer.encode(), completion_tokens=1),
                OutcomeRow(rows["bad"], JobState.FAILED, error.encode(), error_code="invalid_type"),
            ]
        )
    return {name: row.id for name, row in rows.items()}


def job_row(custom_id: str, offset: int) -> JobRow:
    return JobRow(
        id=uuid7(), tenant="default", tier="standard", content_sha=custom_id.encode().ljust(32), src_topic="jobs",
        src_partition=0, src_offset=offset, submitted_at=datetime.now(UTC), batch_id="b", custom_id=custom_id,
    )  # fmt: skip


def read(kafka: str, topic: str, count: int) -> list[dict[str, object]]:
    """The first ``count`` records of a topic, each as its value."""
    return [json.loads(message.value()) for message in read_messages(kafka, topic, count)]


def read_messages(kafka: str, topic: str, count: int) -> list[Message]:
    """The first ``count`` records of a topic."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    found: list[Message] = []
    deadline = time.monotonic() + 120
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            found.append(message)
    consumer.close()
    return found


def test_creating_topics_again_changes_nothing(run: Run, prefix: str) -> None:
    first, second = run("topics", "create", "--json"), run("topics", "create", "--json")
    assert f"{prefix}.jobs.v1.standard" in json.loads(first.stdout)["created"]
    assert json.loads(second.stdout)["created"] == []


def test_more_copies_than_there_are_brokers_are_refused(run: Run) -> None:
    if apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("the embedded broker keeps one copy, whatever it is asked")
    result = run("topics", "create", "--replication", "1000")
    assert result.exit_code == Exit.UNAVAILABLE
    assert "replication factor" in result.output.lower()
    assert run("topics", "describe").exit_code == Exit.NOT_READY


def test_missing_topics_are_described_as_missing(run: Run) -> None:
    result = run("topics", "describe")
    assert result.exit_code == Exit.NOT_READY
    assert "headrace topics create" in result.output


@pytest.mark.usefixtures("topics")
def test_topics_are_described_with_their_records(run: Run, kafka: str, prefix: str) -> None:
    producer = Producer({"bootstrap.servers": kafka})
    for _ in range(5):
        producer.produce(f"{prefix}.jobs.v1.bulk", b"{}")
        producer.flush()  # the embedded broker counts a last batch of many as one
    described = {topic["topic"]: topic for topic in json.loads(run("topics", "describe", "--json").stdout)}
    assert described[f"{prefix}.jobs.v1.bulk"]["records"] == 5
    assert described[f"{prefix}.jobs.v1.bulk"]["partitions"] == 2


@pytest.mark.usefixtures("topics")
def test_a_submitted_file_is_a_batch(run: Run, kafka: str, prefix: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": 2}\nnot json\n')
    result = run("submit", str(file), "--batch", "b", "--tier", "bulk", "--json")
    sent = json.loads(result.stdout)
    assert (result.exit_code, sent["batch_id"], sent["expected"]) == (0, "b", 3)
    assert [problem["param"] for problem in sent["problems"]] == ["prompt", None]
    control = read(kafka, f"{prefix}.control.v1", 2)
    assert [message["type"] for message in control] == ["batch_opened", "batch_closed"]
    assert control[1]["expected"] == 3


@pytest.mark.usefixtures("topics")
def test_prompts_come_from_stdin_too(run: Run, kafka: str, prefix: str) -> None:
    result = run("submit", "-", stdin='{"prompt": "one"}\n{"prompt": "two"}\n')
    assert result.exit_code == 0
    assert "2 jobs sent to tier standard" in result.output
    assert {job["prompt"] for job in read(kafka, f"{prefix}.jobs.v1.standard", 2)} == {"one", "two"}


@pytest.mark.usefixtures("topics")
def test_strict_stops_at_the_first_bad_line(run: Run) -> None:
    result = run("submit", "-", "--strict", stdin='{"prompt": 1}\n{"prompt": "two"}\n')
    assert result.exit_code == Exit.USAGE
    assert "line 1" in result.output


def test_without_topics_a_submit_says_to_create_them(run: Run) -> None:
    result = run("submit", "-", stdin='{"prompt": "one"}\n')
    assert result.exit_code == Exit.NOT_READY
    assert "headrace topics create" in result.output


@pytest.fixture
def broken_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A SIGTERM when Kafka has three jobs of a file."""
    opened: list[Client] = []
    open_client = context.open_client

    def remember(settings: Settings) -> Client:
        opened.append(open_client(settings))
        return opened[0]

    @contextmanager
    def lines(path: str, command: str) -> Iterator[Iterator[bytes]]:
        def read() -> Iterator[bytes]:
            yield from [b'{"prompt": "a"}'] * 3
            opened[0]._outbox.flush()
            signal.raise_signal(signal.SIGTERM)
            yield b'{"prompt": "never"}'

        yield read()

    monkeypatch.setattr(context, "open_client", remember)
    monkeypatch.setattr("headrace.cli.jobs.open_input", lines)
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: None
    )  # in case the command would not handle it
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("topics", "broken_off")
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ((), "submit the file again"),
        (("--batch", "b"), "headrace cancel b --batch"),
        (("--batch", "b", "--idempotency-key", "k"), "same --idempotency-key"),
    ],
)
def test_a_submit_that_is_broken_off_says_what_was_sent_and_how_to_go_on(
    run: Run, options: tuple[str, ...], remedy: str
) -> None:
    result = run("submit", "-", "--json", *options)
    assert result.exit_code == Exit.INTERRUPTED
    error = json.loads(result.stderr)["error"]
    assert "3 jobs" in error["message"]
    assert remedy in error["remedy"]


FOLLOWER = """
import signal
from headrace.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
main()
"""


@pytest.mark.usefixtures("topics", "ended_batch")
def test_a_ctrl_c_leaves_the_results_that_came_and_says_how_many(database_url: str, tmp_path: Path) -> None:
    with Ledger(database_url) as ledger:
        ledger.record([job_row("runs", 7)])
    file = tmp_path / "answers.jsonl"
    command = [sys.executable, "-P", "-c", FOLLOWER, "results", "b", "-f", "-o", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: file.is_file() and file.read_bytes().count(b"\n") == 3)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == Exit.INTERRUPTED
    assert "3 results in" in err
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.usefixtures("topics", "ended_batch")
def test_a_ctrl_c_says_how_many_results_came_to_stdout_too(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(ledger: Ledger, tenant: str, batch_id: str) -> list[RejectionRow]:
        signal.raise_signal(signal.SIGINT)
        return []

    with Ledger(database_url) as ledger:
        ledger.record([job_row("runs", 7)])
    monkeypatch.setattr(Ledger, "rejections", stopped)
    result = run("results", "b", "--follow")
    assert result.exit_code == Exit.INTERRUPTED, result.output
    assert f"Stopped after {len(result.stdout.splitlines())} results." in result.stderr


@pytest.mark.usefixtures("topics")
def test_a_batch_that_is_open_and_has_jobs_takes_more_under_an_idempotency_key_alone(
    run: Run, database_url: str
) -> None:
    with Ledger(database_url) as ledger:
        ledger.apply_control([BatchOpened(batch_id="b"), BatchOpened(batch_id="empty")])
        ledger.record([job_row("waits", 0)])
    refused = run("submit", "-", "--batch", "b", stdin='{"prompt": "one"}\n')
    assert refused.exit_code == Exit.REFUSED
    for remedy in ("--idempotency-key", "another --batch", "headrace cancel b --batch"):
        assert remedy in refused.output
    again = ("submit", "-", "--batch", "b", "--idempotency-key", "k")
    assert run(*again, stdin='{"prompt": "one"}\n').exit_code == 0
    assert run("submit", "-", "--batch", "empty", stdin='{"prompt": "one"}\n').exit_code == 0


@pytest.mark.parametrize("options", [("--batch", "b"), ("--idempotency-key", "k")])
def test_nothing_is_sent_under_a_batch_that_was_cancelled(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    opened: list[Settings] = []
    monkeypatch.setattr(context, "open_client", opened.append)
    batch_id = {"b": "b", "k": batch_named_by("default", "k")}[options[1]]
    with Ledger(database_url) as ledger:
        ledger.apply_control([BatchOpened(batch_id=batch_id), CancelBatch(batch_id=batch_id)])
    refused = run("submit", "-", *options, stdin='{"prompt": "one"}\n')
    assert (refused.exit_code, opened) == (Exit.REFUSED, [])
    assert f"Batch {batch_id} is cancelled; nothing of it would run" in refused.output


def row_of(message: Message) -> JobRow:
    """What the recorder and the workers make of a job's record."""
    place = Source(
        message.topic() or "", message.partition() or 0, message.offset() or 0, message.timestamp()[1]
    )
    envelope = parse_job(message.value(), message.headers(), place).envelope
    return JobRow.of(envelope, place, "standard", "default")


@pytest.mark.usefixtures("topics")
def test_lines_that_were_sent_before_with_other_content_or_in_another_batch_are_named(
    run: Run, database_url: str, kafka: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"custom_id": name, "prompt": name} for name in ("a", "b", "c")]

    def submit(*options: str) -> Result:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return run("submit", "-", "--idempotency-key", "k", *options, stdin=text)

    assert submit().exit_code == 0
    sent = [row_of(message) for message in read_messages(kafka, f"{prefix}.jobs.v1.standard", 3)]
    with Ledger(database_url) as ledger:
        ledger.record(sent)
    assert submit().exit_code == 0
    lines[1]["prompt"], lines[2]["prompt"] = "x", "y"
    changed = submit("--json")
    assert (changed.exit_code, json.loads(changed.stdout)["refused"]) == (Exit.REFUSED, [2, 3])
    assert "2 lines of 3 (line 2, 3) did not run" in json.loads(changed.stderr)["error"]["message"]
    with Ledger(database_url) as ledger:  # complete, before anybody has met the changed lines
        ledger.finish([OutcomeRow(row, JobState.SUCCEEDED, b"{}") for row in sent])
        ledger.apply_control([BatchClosed(batch_id=batch_named_by("default", "k"), expected=3)])
    nothing = Announced("default", batch_named_by("default", "k"))
    monkeypatch.setattr(context, "announced", lambda *_: nothing)  # as where a recorder has read the close
    waited = submit("--follow")
    assert waited.exit_code == Exit.REFUSED
    assert "3 of 3 ended" in waited.output
    assert "2 lines of 3 (line 2, 3) did not run" in waited.output
    elsewhere = submit("--batch", "elsewhere")
    assert elsewhere.exit_code == Exit.REFUSED
    assert f"was used before, in batch {batch_named_by('default', 'k')}" in elsewhere.output


@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize("options", [(), ("--idempotency-key", "k")])
def test_the_job_table_is_asked_of_lines_alone_that_may_have_been_sent_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Ledger, "other_content", lambda ledger, sent: asked.append(len(sent)) or {})
    for job in ('{"prompt": "x"}', '{"job_id": "mine", "prompt": "x"}'):
        assert run("submit", "-", *options, stdin=f'{job}\n{{"prompt": "y"}}\n').exit_code == 0
    assert asked == ([2, 2] if options else [1])


@pytest.fixture
def stranger(database_url: str) -> Iterator[str]:
    """The job table's address for a role that may read nothing there."""
    name = f"stranger_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")  # type: ignore[arg-type]
        yield make_url(database_url).set(username=name, password="x").render_as_string(hide_password=False)
        owner.execute(f"DROP ROLE {name}")  # type: ignore[arg-type]


UNASKABLE = {
    "another kind of database": ("sqlite:///app.db", "this is an address of sqlite"),
    "a bad parameter": ("{url}?sslmode=never", "sslmode must be one of"),
    "a value that libpq alone judges": ("{url}?ssl_min_protocol_version=1.2", "ssl_min_protocol_version"),
    "no right": ("{stranger}", "permission denied"),
    "no table": ("{bare}", "The job table is not as this version needs it"),
}


@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize(("address", "why"), UNASKABLE.values(), ids=list(UNASKABLE))
def test_a_submit_whose_database_is_no_use_sends_everything_and_says_what_it_does_not_know(
    run: Run, database_url: str, stranger: str, monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    bare = make_url(database_url).set(database="postgres").render_as_string(hide_password=False)
    monkeypatch.setenv("DATABASE_URL", address.format(url=database_url, stranger=stranger, bare=bare))
    line = '{"job_id": "a", "prompt": "x"}\n'
    for options in ((), ("--batch", "b"), ("--idempotency-key", "k")):
        told = run("submit", "-", "--json", *options, stdin=line)
        assert (told.exit_code, told.stderr) == (0, "")
        assert (json.loads(told.stdout)["expected"], json.loads(told.stdout)["refused"]) == (1, [])
    shown = run("submit", "-", stdin=line)
    assert shown.exit_code == 0
    assert "Whether lines were refused is not known." in shown.stderr
    assert why in shown.stderr
    assert "headrace status batch_" in shown.stderr


@pytest.mark.usefixtures("topics")
def test_a_followed_submit_whose_database_is_no_use_names_the_batch_that_was_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "sqlite:///app.db")
    told = run("submit", "-", "--follow", "--json", stdin='{"prompt": "x"}\n')
    assert told.exit_code == Exit.USAGE
    sent = json.loads(told.stdout)
    assert sent["batch_id"].startswith("batch_")
    assert (sent["expected"], sent["batch"], sent["interrupted"]) == (1, None, False)
    assert "sqlite" in json.loads(told.stderr)["error"]["message"]


@pytest.mark.usefixtures("topics")
def test_a_followed_submit_that_is_stopped_while_postgres_is_away_ends_as_interrupted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise LedgerUnavailable("connection refused")

    def stopped(ledger: Ledger, tenant: str, batch_id: str) -> None:
        monkeypatch.setattr(Ledger, "batch", away)
        monkeypatch.setattr(Ledger, "other_content", away)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Ledger, "batch", stopped)
    result = run("submit", "-", "--follow", "--json", stdin='{"prompt": "one"}\n')
    assert result.exit_code == Exit.INTERRUPTED, result.output
    told = json.loads(result.stdout)
    assert (told["interrupted"], told["batch"], told["refused"]) == (True, None, [])


@pytest.mark.usefixtures("topics")
def test_a_followed_submit_waits_for_postgres_to_name_the_lines_that_did_not_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_content = Ledger.other_content

    def away_once(*_: object) -> None:
        monkeypatch.setattr(Ledger, "other_content", other_content)
        raise LedgerUnavailable("connection refused")

    def complete(ledger: Ledger, tenant: str, batch_id: str) -> BatchProgress:
        return BatchProgress(
            tenant=tenant, batch_id=batch_id, state=BatchState.COMPLETE, expected=1, submitted=1, queued=0, running=0,
            succeeded=1, failed=0, cancelled=0, expired=0, rejected=0, prompt_tokens=0, cached_tokens=0,
            completion_tokens=0, opened_at=None, closed_at=None,
        )  # fmt: skip

    monkeypatch.setattr(waiting, "AGAIN_S", 0.0)
    monkeypatch.setattr(Ledger, "batch", complete)
    monkeypatch.setattr(Ledger, "other_content", away_once)
    result = run("submit", "-", "--follow", stdin='{"prompt": "one"}\n')
    assert result.exit_code == 0, result.output
    assert "Postgres is back." in result.stderr


@pytest.mark.usefixtures("topics")
def test_lines_that_cannot_be_sent_are_told_first_and_in_the_exit_code(run: Run) -> None:
    bad = '{"prompt": 1}\n' * 6
    lines = (
        bad + '{"prompt": "x", "batch_id": "other"}\n{"prompt": "y", "tenant": "other"}\n{"prompt": "good"}\n'
    )
    result = run("submit", "-", "--batch", "b", stdin=lines)
    assert result.exit_code == Exit.USAGE
    assert "7 jobs sent" in result.output
    problems = [line for line in result.stderr.splitlines() if line.startswith("line ")]
    assert [line.partition(":")[0] for line in problems] == ["line 7", "line 8", "line 1", "line 2", "line 3"]
    assert "2 lines could not be sent (line 7, 8)" in result.output
    told = run(
        "submit",
        "-",
        "--batch",
        "c",
        "--json",
        stdin='{"prompt": "%s"}\n{"prompt": "a"}\n' % ("x" * 1_000_000),
    )
    assert told.exit_code == Exit.USAGE
    assert (json.loads(told.stdout)["not_sent"], json.loads(told.stdout)["expected"]) == (1, 1)
    assert "HEADRACE_KAFKA_MESSAGE_MAX_BYTES" in json.loads(told.stderr)["error"]["message"]


@pytest.mark.usefixtures("topics")
def test_a_second_copy_of_a_job_is_no_error(run: Run) -> None:
    result = run("submit", "-", stdin='{"job_id": "a", "prompt": "x"}\n' * 2)
    assert result.exit_code == 0
    assert "1 job sent" in result.output
    assert "it is the same job (not sent)" in result.output


@pytest.mark.usefixtures("topics")
def test_lines_that_repeat_a_custom_id_run_and_are_warned_of_once(run: Run) -> None:
    result = run("submit", "-", stdin='{"custom_id": "a", "prompt": "x"}\n' * 9)
    assert result.exit_code == 0
    assert "9 jobs sent" in result.output
    assert result.stderr.count("custom_id") == 1
    assert "8 lines (line 2, 3, 4, 5, 6 and 3 more) repeat the custom_id of an earlier one" in result.stderr
    once = run("submit", "-", stdin='{"custom_id": "a", "prompt": "x"}\n' * 2)
    assert "1 line (line 2) repeats the custom_id" in once.stderr


@pytest.mark.usefixtures("topics")
def test_fields_that_no_job_has_are_named_once_and_the_lines_run(run: Run) -> None:
    line = '{"prompt": "x", "sampling": {"temprature": 0}}\n'
    result = run("submit", "-", "--strict", stdin=line * 3)
    assert result.exit_code == 0
    assert "3 jobs sent" in result.output
    assert (
        "line 1: sampling.temprature is no field of a job and is ignored; did you mean sampling.temperature?"
        " (and 2 more lines)\n" in result.stderr
    )
    assert result.stderr.count("temprature") == 1
    told = json.loads(run("submit", "-", "--json", stdin=line * 3).stdout)
    assert told["problems"] == []
    assert told["unknown_fields"] == [
        {"path": "sampling.temprature", "meant": "sampling.temperature", "line": 1, "more": 2}
    ]
    many = json.dumps({"prompt": "x", **{f"\x1b{number}": 1 for number in range(22)}})
    result = run("submit", "-", stdin=many)
    assert "line 1: \\x1b19 is no field" in result.stderr
    assert "... and 2 more such fields; --json names them." in result.stderr


@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize(("deadline", "passed"), [("2020-01-01T00:00:00Z", True), ("1d", False)])
def test_a_deadline_that_has_passed_is_told(run: Run, deadline: str, passed: bool) -> None:
    result = run("submit", "-", "--deadline", deadline, stdin='{"prompt": "x"}\n')
    assert result.exit_code == 0
    assert ("The --deadline has passed" in result.stderr) is passed


def test_who_asks_for_a_custom_id_is_told_what_a_job_goes_by(run: Run) -> None:
    result = run("status", "q-1")
    assert result.exit_code == Exit.NOT_FOUND
    assert "A job goes by its id or job_id, not by its custom_id." in result.stderr


@pytest.mark.usefixtures("topics", "ended_batch")
def test_a_batch_that_was_closed_takes_more_under_an_idempotency_key_alone(run: Run) -> None:
    refused = run("submit", "-", "--batch", "b", stdin='{"prompt": "one"}\n')
    assert refused.exit_code == Exit.REFUSED
    assert "--idempotency-key" in refused.output
    again = run("submit", "-", "--batch", "b", "--idempotency-key", "k", stdin='{"prompt": "one"}\n')
    assert again.exit_code == 0
    assert "1 job sent" in again.output
    assert run("submit", "-", "--batch", "c", stdin='{"prompt": "one"}\n').exit_code == 0


def test_following_a_status_ends_as_interrupted_after_a_signal(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(database_url) as ledger:
        ledger.apply_control([BatchOpened(batch_id="open")])
    monkeypatch.setattr(Stop, "wait", lambda stop, timeout=None: stop.set() or True)
    result = run("status", "open", "--follow", "--json")
    assert result.exit_code == Exit.INTERRUPTED
    assert json.loads(result.stdout)["interrupted"] is True


@pytest.mark.usefixtures("ended_batch")
def test_a_batchs_status_is_its_counts(run: Run) -> None:
    batch = json.loads(run("status", "b", "--json").stdout)
    assert (batch["state"], batch["succeeded"], batch["failed"], batch["rejected"]) == ("complete", 1, 1, 1)
    text = run("status", "b", "--follow")
    assert text.exit_code == 0
    assert "complete, 3 of 3 ended" in text.output


def test_a_status_says_that_what_runs_may_still_wait_inside_its_engine(run: Run, database_url: str) -> None:
    with Ledger(database_url) as ledger:
        ledger.begin([AttemptRow(job_row(name, number), "w") for number, name in enumerate("ab")])
    assert "2 (in an engine, or waiting inside it)" in run("status", "b").output
    assert json.loads(run("status", "b", "--json").stdout)["running"] == 2


def test_a_jobs_status_is_found_by_its_id(run: Run, ended_batch: dict[str, UUID]) -> None:
    job = json.loads(run("status", str(ended_batch["bad"]), "--json").stdout)
    assert (job["custom_id"], job["state"], job["error_code"]) == ("bad", "failed", "invalid_type")
    assert "failed" in run("status", str(ended_batch["bad"])).output


def test_what_nobody_knows_is_not_found(run: Run) -> None:
    assert run("status", "nothing").exit_code == Exit.NOT_FOUND
    assert run("results", "nothing").exit_code == Exit.NOT_FOUND
    assert run("cancel", "nothing").exit_code == Exit.NOT_FOUND


@pytest.mark.usefixtures("ended_batch")
def test_results_are_lines(run: Run, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run("results", "b").stdout.splitlines()]
    assert {line["state"] for line in lines} == {"succeeded", "failed", "rejected"}
    file = tmp_path / "out.jsonl"
    summary = json.loads(
        run("results", "b", "-o", str(file), "--format", "openai", "--follow", "--json").stdout
    )
    assert summary["written"] == 3
    assert sum(json.loads(line)["response"] is not None for line in file.read_text().splitlines()) == 1


@pytest.mark.usefixtures("ended_batch")
def test_following_without_kafka_believes_the_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    away = run("results", "b", "--follow")  # its topics are not there
    assert (away.exit_code, len(away.stdout.splitlines())) == (0, 3)
    assert "is not known: topic" in away.stderr
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS")
    without = run("results", "b", "--follow")
    assert (without.exit_code, without.stdout, without.stderr) == (0, away.stdout, "")


def test_a_single_jobs_result_can_be_had(run: Run, ended_batch: dict[str, UUID]) -> None:
    result = json.loads(run("results", str(ended_batch["good"])).stdout)
    assert result["choices"][0]["text"] == "Paris"


@pytest.mark.usefixtures("ended_batch")
def test_a_runs_results_are_without_what_was_rejected_before_it_could_run(run: Run) -> None:
    lines = [json.loads(line) for line in run("results", "b", "--run", "1").stdout.splitlines()]
    assert {line["state"] for line in lines} == {"succeeded", "failed"}


@pytest.mark.usefixtures("ended_batch")
@pytest.mark.parametrize("number", [2, 2**31, 2**63, 10**30])
def test_a_run_that_no_job_has_is_not_found_and_the_output_is_left_as_it_is(
    number: int, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("former results\n")
    result = run("results", "b", "--run", str(number), "--output", str(file))
    assert result.exit_code == Exit.NOT_FOUND, result.output
    assert f"No job of batch b has a run {number}." in result.output
    assert file.read_text() == "former results\n"


def test_a_job_has_no_run_to_choose_and_the_output_is_left_as_it_is(
    run: Run, ended_batch: dict[str, UUID], tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("former results\n")
    result = run("results", str(ended_batch["good"]), "--run", "1", "--output", str(file))
    assert result.exit_code == Exit.USAGE
    assert "--run is for batches" in result.output
    assert file.read_text() == "former results\n"


@pytest.mark.usefixtures("topics", "ended_batch")
def test_a_cancel_goes_out_for_what_it_names(run: Run, kafka: str, prefix: str) -> None:
    assert json.loads(run("cancel", "b", "--json").stdout)["kind"] == "batch"
    assert json.loads(run("cancel", "unseen", "--job", "--json").stdout)["kind"] == "job"
    messages = read(kafka, f"{prefix}.control.v1", 2)
    assert {str(message["type"]) for message in messages} == {"cancel_batch", "cancel_job"}


def test_a_cancel_of_a_batch_and_a_job_in_one_is_a_usage_error(run: Run) -> None:
    assert run("cancel", "b", "--batch", "--job").exit_code == Exit.USAGE


def test_migrations_can_be_checked(run: Run) -> None:
    assert run("migrate", "--check").exit_code == 0
    assert json.loads(run("migrate", "--json").stdout) == {"migrated": True}


@pytest.mark.usefixtures("topics")
def test_doctor_is_content_with_a_working_installation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEVICE", "cpu")
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"] is True


def test_doctor_and_status_say_why_a_worker_that_lives_takes_no_jobs(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"workers": doctor.CHECKS["workers"]})
    with Ledger(database_url) as ledger:
        ledger.heartbeat("w", "", "m", 3600)
        ledger.record([job_row("waits", 0)])
    status = loading("w", "m")
    server = HealthServer(0, lambda: status)
    try:
        monkeypatch.setenv("HEADRACE_HEALTH_PORT", str(server.port))
        (finding,) = json.loads(run("doctor", "--json").stdout)["findings"]
        assert finding["ok"] is None
        for told in (finding["detail"], run("status", "b").stderr):
            assert "takes no jobs: the model is not loaded yet" in told
        status = replace(status, paused=None)
        (finding,) = json.loads(run("doctor", "--json").stdout)["findings"]
        assert finding["ok"]
        assert "takes no jobs" not in run("status", "b").output
    finally:
        server.close()
    (finding,) = json.loads(run("doctor", "--json").stdout)["findings"]
    assert finding["ok"]


@pytest.mark.usefixtures("topics")
def test_doctor_says_when_results_or_dead_letters_do_not_fit_their_topics(
    run: Run, kafka: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("the embedded broker does not say what a topic takes")
    monkeypatch.setattr(doctor, "CHECKS", {"sizes": doctor.CHECKS["sizes"]})
    (finding,) = json.loads(run("doctor", "--json").stdout)["findings"]
    assert finding["ok"] is True

    monkeypatch.setenv("HEADRACE_MAX_RESULT_BYTES", "2000000")
    result = run("doctor", "--json")
    (finding,) = json.loads(result.stdout)["findings"]
    assert result.exit_code == Exit.NOT_READY
    assert f"{prefix}.results.v1 takes 1,048,588 bytes" in finding["detail"]
    assert f"Give {prefix}.results.v1 a max.message.bytes of 2016384" in finding["remedy"]
    assert f"HEADRACE_MAX_RESULT_BYTES={1_048_588 - 16_384}" in finding["remedy"]
    assert "dead" not in finding["detail"]

    monkeypatch.setenv("HEADRACE_MAX_RESULT_BYTES", str(1_048_588 - 16_384))
    set_largest(kafka, f"{prefix}.dead.v1", 1_048_588)
    (finding,) = json.loads(run("doctor", "--json").stdout)["findings"]
    assert finding["ok"] is False
    assert finding["detail"].startswith(f"{prefix}.dead.v1 takes 1,048,588 bytes")


def set_largest(kafka: str, topic: str, size: int) -> None:
    """What the topic takes, once the broker says so itself."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient({"bootstrap.servers": kafka})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    (altered,) = admin.incremental_alter_configs([resource]).values()
    altered.result(120)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        (told,) = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values()
        if told.result(120)["max.message.bytes"].value == str(size):
            return
        time.sleep(0.05)
    raise AssertionError(f"{topic} does not take the change")


def test_doctor_says_when_a_connection_pooler_is_in_between(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)  # as PgBouncer makes one up
    findings = {each["check"]: each for each in json.loads(run("doctor", "--json").stdout)["findings"]}
    assert findings["database"]["ok"] is None
    assert "pooler" in findings["database"]["detail"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400)])
def test_a_deadline_may_be_a_duration(text: str, seconds: int) -> None:
    expected = datetime.now(UTC) + timedelta(seconds=seconds)
    assert abs(parse_deadline(text) - expected) < timedelta(seconds=30)


def test_a_deadline_may_be_a_time() -> None:
    assert parse_deadline("2027-01-31T12:00:00Z") == datetime(2027, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["soon", "", "2027-01-31T12:00:00", "9" * 40 + "d"])
def test_any_other_deadline_is_refused(text: str) -> None:
    with pytest.raises(Failure, match="no time"):
        parse_deadline(text)
