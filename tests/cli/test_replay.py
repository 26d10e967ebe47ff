"""`headrace retry` and `headrace dlq` end to end: a broker, a job table, a recorder and workers."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import apache_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pipeline import Pipeline, pipeline
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.cli.exits import Exit
from headrace.ledger import Ledger
from headrace.ledger.recorder import Recorder
from headrace.schemas import BatchClosed, BatchOpened, CancelBatch, CancelJob, JobState, topics

Run = Callable[..., Result]


@pytest.fixture
def line(kafka: str, database_url: str) -> Iterator[Pipeline]:
    with pipeline(kafka, database_url) as made:
        yield made


@pytest.fixture
def recorder(line: Pipeline) -> Iterator[None]:
    stop = threading.Event()
    with Ledger(line.database_url) as ledger:
        made = Recorder(line.bootstrap, line.topics, ledger)
        thread = threading.Thread(target=made.run, args=(stop,))
        thread.start()
        yield
        stop.set()
        thread.join(120)


@pytest.fixture
def run(line: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", line.bootstrap)
    monkeypatch.setenv("DATABASE_URL", line.database_url)
    monkeypatch.setenv("HEADRACE_TOPIC_PREFIX", line.topics.prefix)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return invoke


def assert_books_balance(line: Pipeline) -> None:
    """The batch's counters are the rows, and it is complete."""
    line.wait_for(lambda: line.ledger.batch("default", "b").complete)
    batch = line.ledger.batch("default", "b")
    assert {state: getattr(batch, state) for state in JobState if getattr(batch, state)} == dict(
        line.states()
    )
    assert batch.submitted + batch.rejected == batch.expected
    rejected = line.query("SELECT count(*) FROM rejections WHERE NOT reopened")
    assert rejected == [(batch.rejected,)]


def send_batch(line: Pipeline, prompts: list[str], rejected: int = 0) -> None:
    """A batch `b` of jobs that are named by their place alone, and records that are no jobs."""
    line.control(BatchOpened(batch_id="b"))
    for number, prompt in enumerate(prompts):
        line.send({"prompt": prompt, "batch_id": "b", "custom_id": str(number)}, partition=number % 4)
    for number in range(rejected):
        line.send(b"{no json %d" % number, headers=[("headrace-batch-id", b"b"), ("x", b"y")], key=b"k")
    line.flush()
    line.control(BatchClosed(batch_id="b", expected=len(prompts) + rejected))


def test_failed_jobs_of_a_batch_run_again_as_their_next_run(
    line: Pipeline, recorder: None, run: Run, tmp_path: Path
) -> None:
    mended = tmp_path / "mended"
    send_batch(line, [f"fail-unless:{mended}" if n % 2 else f"prompt {n}" for n in range(20)])
    line.start_worker()
    line.wait_terminal(20)
    assert_books_balance(line)
    ids = set(line.rows())
    assert line.states() == {"succeeded": 10, "failed": 10}

    mended.touch()
    told = json.loads(run("retry", "b", "--failed-only", "--json").stdout)
    assert (told["sent_again"], told["gone"]) == (10, [])
    line.wait_for(lambda: line.states() == {"succeeded": 20})

    assert set(line.rows()) == ids
    assert line.query("SELECT run, attempt, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1") == [
        (1, 1, 10),
        (2, 1, 10),
    ]
    assert_books_balance(line)
    runs = [
        (message.key(), json.loads(message.value())["run"]) for message in line.take(line.topics.results, 30)
    ]
    assert len(set(runs)) == 30
    first = [json.loads(text) for text in run("results", "b", "--run", "1").stdout.splitlines()]
    assert sorted((result["run"], result["state"]) for result in first) == 10 * [(1, "failed")] + 10 * [
        (1, "succeeded")
    ]
    assert json.loads(run("retry", "b", "--json").stdout)["sent_again"] == 0


def test_a_retry_that_no_worker_has_met_shows_at_once(line: Pipeline, recorder: None, run: Run) -> None:
    send_batch(line, ["fail:no_good"])
    worker = line.start_worker()
    line.wait_terminal(1)
    assert_books_balance(line)
    worker.close()
    assert run("retry", "b").exit_code == 0
    status = json.loads(run("status", "b", "--json").stdout)
    assert (status["state"], status["queued"], status["failed"]) == ("closed", 1, 0)
    assert run("results", "b").stdout == ""
    (former,) = run("results", "b", "--run", "1").stdout.splitlines()
    assert json.loads(former)["error"]["code"] == "no_good"
    assert run("results", "b", "--run", "2").stdout == ""
    assert run("results", "b", "--run", "1", "--follow").exit_code == Exit.USAGE


@pytest.mark.parametrize("which", ["--all", "--failed-only"])
def test_a_batch_that_was_cancelled_is_not_run_again_and_keeps_what_it_has(
    line: Pipeline, run: Run, which: str
) -> None:
    send_batch(line, ["one", "fail:no_good"])
    line.start_worker()
    line.wait_terminal(2)
    line.ledger.apply_control([BatchOpened(batch_id="b"), CancelBatch(batch_id="b")])
    ended = line.states()

    refused = run("retry", "b", which)
    assert refused.exit_code == Exit.REFUSED
    assert "Batch b is cancelled; nothing of it would run" in refused.output
    assert "as another batch" in refused.output
    assert line.states() == ended == {"succeeded": 1, "failed": 1}


def test_jobs_that_would_end_as_cancelled_or_expired_are_left_as_they_are_and_the_others_run(
    line: Pipeline, recorder: None, run: Run
) -> None:
    cancelled, again = (line.submit(batch_id="b") for _ in range(2))
    late = line.submit(batch_id="b", deadline="2020-01-01T00:00:00Z")
    line.start_worker()
    line.wait_terminal(3)
    line.control(CancelJob(id=cancelled))
    line.wait_for(lambda: line.query("SELECT count(*) FROM cancels") == [(1,)])
    before = line.rows()
    assert before == {cancelled: "succeeded", again: "succeeded", late: "expired"}

    result = run("retry", "b", "--all")
    assert result.exit_code == Exit.NOT_FOUND
    told = " ".join(result.output.split())
    assert "1 job of batch b run again." in told
    assert (
        f"1 job cannot run again: a cancel holds, so the next run would end as cancelled (the first: {cancelled})."
        in told
    )
    assert (
        f"1 job cannot run again: the deadline has passed, so the next run would end as expired (the first: {late})."
        in told
    )
    assert "Submit those again, as new jobs of another batch." in told
    line.wait_for(lambda: line.query("SELECT run, state FROM jobs WHERE run > 1") == [(2, 2)])
    assert line.rows() == before

    result = run("retry", "b", "--all", "--json")
    assert result.exit_code == Exit.NOT_FOUND
    told = json.loads(result.stdout)
    assert (told["sent_again"], told["gone"]) == (1, [])
    assert (told["cancelled"], told["expired"]) == ([str(cancelled)], [str(late)])
    line.wait_for(lambda: line.query("SELECT run, state FROM jobs WHERE run > 1") == [(3, 2)])
    assert line.rows() == before

    line.control(CancelJob(id=again))
    line.wait_for(lambda: line.query("SELECT count(*) FROM cancels") == [(2,)])
    told = json.loads(run("retry", "b", "--all", "--json").stdout)
    assert (told["sent_again"], len(told["cancelled"]), len(told["expired"])) == (0, 2, 1)
    assert line.rows() == before


def test_jobs_whose_records_are_gone_are_named_and_the_others_run(
    line: Pipeline, recorder: None, run: Run
) -> None:
    if apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("needs a broker that deletes records")
    send_batch(line, ["fail:no_good"] * 8)
    line.start_worker()
    line.wait_terminal(8)
    line.wait_for(lambda: line.lag() == 0)
    at = TopicPartition(line.topics.jobs("standard"), 1, -1)  # -1: up to its end
    admin = AdminClient({"bootstrap.servers": line.bootstrap})  # lives until the answer is in
    admin.delete_records([at])[at].result(120)

    result = run("retry", "b", "--failed-only")
    assert result.exit_code == Exit.NOT_FOUND
    assert "2 jobs cannot run again" in result.output
    assert f"{at.topic}[1]" in result.output
    line.wait_for(lambda: line.query("SELECT count(*) FROM jobs WHERE run = 2 AND state = 3") == [(6,)])
    assert_books_balance(line)


def test_an_unknown_batch_cannot_be_retried(run: Run) -> None:
    assert run("retry", "nothing", "--failed-only").exit_code == Exit.NOT_FOUND


def test_a_replayed_dead_letter_is_the_same_bytes_and_rejected_once(
    line: Pipeline, recorder: None, run: Run
) -> None:
    send_batch(line, ["hello"], rejected=3)
    line.start_worker()
    line.wait_terminal(1)
    line.dead_letters(3)
    assert_books_balance(line)

    listed = json.loads(run("dlq", "list", "--json").stdout)
    assert [(each["code"], each["batch_id"], each["run"]) for each in listed] == [
        ("invalid_json", "b", 1)
    ] * 3
    names = [each["letter"] for each in listed]
    shown = json.loads(run("dlq", "show", names[0], "--json").stdout)
    assert (shown["value"], shown["x"]) == ("{no json 0", "y")
    assert run("dlq", "show", names[1], "--value").stdout == "{no json 1"

    replayed = json.loads(run("dlq", "replay", names[0], "--json").stdout)
    assert replayed == {"replayed": 1, "passed_over": 0, "settled": {}, "cancelled": [], "expired": []}
    letters = line.dead_letters(4)
    line.wait_for(
        lambda: line.query("SELECT count(*) FROM rejections WHERE run = 2 AND NOT reopened") == [(1,)]
    )
    assert_books_balance(line)
    again = [message for message in letters if dict(message.headers())[topics.DEAD_RUN] == b"2"]
    assert [(message.key(), message.value()) for message in again] == [(b"k", b"{no json 0")]
    assert dict(again[0].headers())["x"] == b"y"

    listed = json.loads(run("dlq", "list", "--json").stdout)
    assert sorted(each["run"] for each in listed) == [1, 1, 2]
    assert json.loads(run("dlq", "drop", "--every", "--json").stdout) == {"dropped": 3, "settled": {}}
    assert json.loads(run("dlq", "list", "--json").stdout) == []
    settled = json.loads(run("dlq", "list", "--all", "--json").stdout)
    assert sorted(each["settled"] for each in settled) == ["dropped"] * 3 + ["replayed"]
    assert_books_balance(line)


def test_a_replayed_engine_killer_gets_a_fresh_run(line: Pipeline, run: Run, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    id = line.submit(f"die-unless:{mended}", batch_id="b")
    line.start_worker()
    line.wait_for(lambda: line.rows().get(id) == "failed")
    (letter,) = line.dead_letters(1)
    assert dict(letter.headers())[topics.DEAD_CODE] == b"engine_failure"
    deaths = line.query("SELECT count(*) FROM attempts WHERE died")

    mended.touch()
    assert "1 dead letter sent back." in run("dlq", "replay", "--code", "engine_failure").output
    line.wait_for(lambda: line.rows()[id] == "succeeded")
    assert line.query("SELECT run, attempt FROM jobs") == [(2, 1)]
    assert line.query("SELECT count(*) FROM attempts WHERE died") == deaths
    name = f"{letter.partition()}:{letter.offset()}"
    for command in ("replay", "drop"):
        told = run("dlq", command, name).output
        assert f"{name} was replayed already" in told
        assert "0 dead letters" in told
    # Asked for all the same, it is seen to be of a run that is over.
    again = json.loads(run("dlq", "replay", name, "--again", "--json").stdout)
    assert (again["replayed"], again["passed_over"], again["settled"]) == (0, 1, {})


def a_rejected_letter(line: Pipeline) -> str:
    """A record that is no job, met by a worker; returns the name of its letter."""
    line.send(b"{no json")
    line.flush()
    line.start_worker()
    (letter,) = line.dead_letters(1)
    return f"{letter.partition()}:{letter.offset()}"


def test_a_letter_is_sent_back_twice_only_where_that_is_asked_for(line: Pipeline, run: Run) -> None:
    name = a_rejected_letter(line)
    told = [json.loads(run("dlq", "replay", name, *more, "--json").stdout) for more in ((), (), ("--again",))]
    assert [each["replayed"] for each in told] == [1, 0, 1]
    assert [each["settled"] for each in told] == [{}, {name: "replayed"}, {}]


def test_a_dropped_letter_that_is_sent_back_after_all_is_listed_as_replayed(line: Pipeline, run: Run) -> None:
    name = a_rejected_letter(line)

    def listed_as() -> object:
        listed = json.loads(run("dlq", "list", "--all", "--json").stdout)
        return {each["letter"]: each["settled"] for each in listed}[name]

    run("dlq", "drop", name)
    assert "0 dead letters sent back." in run("dlq", "replay", name).output
    assert listed_as() == "dropped"
    assert "1 dead letter sent back." in run("dlq", "replay", name, "--again").output
    assert listed_as() == "replayed"
    assert f"{name} was replayed already; --again sends it back" in run("dlq", "replay", name).output


def test_letters_of_jobs_that_would_end_as_cancelled_or_expired_are_left_and_the_others_sent(
    line: Pipeline, recorder: None, run: Run
) -> None:
    cancelled, again = (line.submit("fail:internal_error", batch_id="b") for _ in range(2))
    late = line.submit("fail:internal_error", batch_id="late")
    line.start_worker()
    line.wait_terminal(3)
    letters = {UUID(json.loads(message.value())["job_id"]): message for message in line.dead_letters(3)}
    name = {id: f"{letter.partition()}:{letter.offset()}" for id, letter in letters.items()}
    line.control(CancelJob(id=cancelled))
    line.control(BatchOpened(batch_id="late", expires_at=datetime(2020, 1, 1, tzinfo=UTC)))
    line.wait_for(lambda: line.query("SELECT count(*) FROM cancels") == [(1,)])
    line.wait_for(lambda: line.query("SELECT count(*) FROM batches WHERE expires_at < now()") == [(1,)])

    result = run("dlq", "replay", "--every")
    assert result.exit_code == Exit.NOT_FOUND
    told = " ".join(result.output.split())
    assert "1 dead letter sent back." in told
    assert (
        "1 job cannot run again: a cancel holds, so the next run would end as cancelled"
        f" (the first: {name[cancelled]})." in told
    )
    assert (
        "1 job cannot run again: the deadline has passed, so the next run would end as expired"
        f" (the first: {name[late]})." in told
    )
    assert "`headrace dlq show --value` gives what was sent" in told
    line.dead_letters(4)
    line.wait_for(lambda: dict(line.query("SELECT id, run FROM jobs")) == {cancelled: 1, again: 2, late: 1})
    assert line.states() == {"failed": 3}

    asked = name[cancelled], name[late], name[again]  # the last is dealt with
    result = run("dlq", "replay", *asked, "--json")
    assert result.exit_code == Exit.NOT_FOUND
    assert json.loads(result.stdout) == {
        "replayed": 0,
        "passed_over": 0,
        "settled": {name[again]: "replayed"},
        "cancelled": [name[cancelled]],
        "expired": [name[late]],
    }
    listed = {each["letter"] for each in json.loads(run("dlq", "list", "--json").stdout)}
    assert {name[cancelled], name[late]} < listed
    assert name[again] not in listed


@pytest.mark.parametrize("command", ["show", "replay", "drop"])
def test_a_letter_that_is_not_there_is_not_found(run: Run, command: str) -> None:
    if command == "show" and apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("needs a broker that says when an offset lies beyond a partition's end")
    result = run("dlq", command, "0:7")
    assert result.exit_code == Exit.NOT_FOUND, result.output


@pytest.mark.parametrize("command", ["list", "replay", "drop"])
def test_letters_of_a_batch_that_nobody_has_are_not_found(line: Pipeline, run: Run, command: str) -> None:
    result = run("dlq", command, "--batch", "b")
    assert result.exit_code == Exit.NOT_FOUND, result.output
    assert "Nothing is known of a batch 'b', of whatever tenant." in result.output
    line.ledger.apply_control([BatchOpened(tenant="acme", batch_id="b")])
    assert run("dlq", command, "--batch", "b").exit_code == 0


@pytest.mark.parametrize("command", ["list", "replay", "drop"])
def test_a_code_that_no_letter_can_have_is_refused_and_those_that_there_are_named(
    line: Pipeline, run: Run, command: str
) -> None:
    for code in ("engine_failures", "invalid_value"):
        result = run("dlq", command, "--code", code)
        assert result.exit_code == Exit.USAGE
        assert f"No dead letter has the code '{code}'." in result.output
        assert "Codes of theirs are empty_value, invalid_encoding, " in result.output
        assert ", engine_failure, non_finite_values, internal_error." in result.output
    assert run("dlq", command, "--code", "engine_failure").exit_code == 0


def test_a_letter_with_a_code_of_a_newer_worker_is_found_by_it(line: Pipeline, run: Run) -> None:
    line.producer.produce(line.topics.dead, b"?", headers=[(topics.DEAD_CODE, b"too_new")])
    line.flush()
    (listed,) = json.loads(run("dlq", "list", "--code", "too_new", "--json").stdout)
    assert listed["code"] == "too_new"


def test_letters_that_outlive_their_batch_are_there_whatever_else_they_must_fit(
    line: Pipeline, run: Run
) -> None:
    line.send(b"{no json", headers=[("headrace-batch-id", b"b")])
    line.flush()
    line.start_worker()
    line.dead_letters(1)
    line.wait_for(lambda: line.query("DELETE FROM batches RETURNING batch_id"))
    assert len(json.loads(run("dlq", "list", "--batch", "b", "--json").stdout)) == 1
    told = run("dlq", "replay", "--batch", "b", "--code", "engine_failure")
    assert (told.exit_code, told.stderr) == (0, "0 dead letters sent back.\n")


def test_again_is_for_letters_that_are_named(run: Run) -> None:
    result = run("dlq", "replay", "--every", "--again")
    assert result.exit_code == Exit.USAGE, result.output
    assert "--again is for letters that are named" in result.output


@pytest.mark.parametrize("letter", ["99999999999:0", "0:99999999999999999999"])
def test_a_letter_beyond_kafka_s_numbers_is_not_found(run: Run, letter: str) -> None:
    result = run("dlq", "show", letter)
    assert result.exit_code == Exit.NOT_FOUND, result.output
    assert f"There is no dead letter {letter}." in result.output


@pytest.mark.parametrize("command", ["replay", "drop"])
def test_nothing_is_replayed_or_dropped_unasked(run: Run, command: str) -> None:
    result = run("dlq", command)
    assert result.exit_code == Exit.USAGE
    assert "--every" in result.output


@pytest.mark.parametrize("command", ["replay", "drop"])
def test_it_is_either_some_letters_or_every_one(run: Run, command: str) -> None:
    result = run("dlq", command, "--every", "4:0")
    assert result.exit_code == Exit.USAGE, result.output
    assert "Leave one of the two out." in result.output


def test_a_letter_s_name_is_its_partition_and_offset(run: Run) -> None:
    assert run("dlq", "show", "seven").exit_code == Exit.USAGE
