"""A user's mistake is one sentence, a remedy and an exit code; never a traceback."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import IO

import postgres
import psycopg
import pytest
import torch
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner, Result

from headrace.cli import app, context, doctor
from headrace.cli.errors import RULES, Failure, translate
from headrace.cli.exits import Exit
from headrace.cli.output import fields, note, open_output
from headrace.engine.config import EngineConfig
from headrace.engine.errors import BadCheckpoint, EngineError
from headrace.ledger import LedgerUnavailable, require_migrated
from headrace.local.child import Identity
from headrace.local.errors import ChildFailed, MissingPart
from headrace.local.state import Addresses, Record, StateDir
from headrace.settings import child_environment
from headrace.worker import WorkerConfig

CLOSED_PORT = 1  # nobody has it, and the system gives it to nobody


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No addresses anywhere."""
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_about_an_error_that_exists(name: str) -> None:
    module, _, kind = name.rpartition(".")
    module = "confluent_kafka.cimpl" if module == "cimpl" else module
    assert issubclass(getattr(import_module(module), kind), BaseException)


def test_a_subclass_has_its_own_rule_or_its_parents() -> None:
    own, parents = translate(BadCheckpoint("no weights")), translate(EngineError("lag must be 0, 1 or 2"))
    assert own is not None
    assert own.exit_code is Exit.REFUSED
    assert parents is not None
    assert parents.exit_code is Exit.USAGE


def test_an_error_that_brings_a_remedy_keeps_it() -> None:
    failure = translate(MissingPart("The broker is not installed.", "Install it."))
    assert failure is not None
    assert (failure.message, failure.remedy) == ("The broker is not installed.", "Install it.")


def test_what_a_process_of_the_stack_said_last_is_told_whatever_it_is_about() -> None:
    failure = translate(
        ChildFailed("The migration ended with status 4.\n    error: no connection", "Its log: x")
    )
    assert failure is not None
    assert failure.message == "The migration ended with status 4.\n    error: no connection"


def test_of_the_lines_for_each_address_of_a_database_the_first_is_told() -> None:
    failure = translate(LedgerUnavailable("connection failed: a\nconnection failed: b"))
    assert failure is not None
    assert failure.message == "The database cannot be reached: connection failed: a"


def test_a_defect_is_not_translated() -> None:
    assert translate(ZeroDivisionError("division by zero")) is None


def test_a_failure_is_itself() -> None:
    failure = Failure(Exit.USAGE, "No.")
    assert translate(failure) is failure


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "command", ["status b", "results b", "cancel b", "migrate", "topics create", "topics describe"]
)
def test_without_addresses_a_command_says_how_to_get_them(command: str) -> None:
    result = run(*command.split())
    assert result.exit_code == Exit.NOT_READY
    assert "headrace local up" in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["status b", "topics describe"])
def test_where_a_stack_was_killed_a_command_says_how_to_clear_it(command: str, tmp_path: Path) -> None:
    assert "headrace local down" not in run(*command.split()).output
    (tmp_path / "stack.json").write_text("{}")
    result = run(*command.split())
    assert result.exit_code == Exit.NOT_READY
    assert "headrace local down" in result.output


@pytest.mark.usefixtures("bare")
def test_a_failure_is_json_with_json() -> None:
    result = run("status", "b", "--json")
    error = json.loads(result.stderr)["error"]
    assert result.exit_code == error["exit_code"] == Exit.NOT_READY
    assert "DATABASE_URL" in error["remedy"]
    assert result.stdout == ""


@pytest.mark.usefixtures("bare")
def test_a_defect_is_json_too_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("headrace.cli.context.load_settings", fail)
    result = run("status", "b", "--json")
    error = json.loads(result.stderr)["error"]
    assert result.exit_code == error["exit_code"] == Exit.BUG
    assert "ZeroDivisionError: division by zero" in error["message"]
    assert isinstance(run("status", "b").exception, ZeroDivisionError)


@pytest.mark.usefixtures("bare")
def test_an_option_that_no_database_knows_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:secret@127.0.0.1:1/x?colour=blue")
    for command in ("migrate", "status b"):
        result = run(*command.split())
        assert result.exit_code == Exit.USAGE
        assert "colour" in result.output
        assert "secret" not in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["migrate", "status b", "recorder"])
def test_a_value_that_a_database_s_option_cannot_have_is_a_usage_error_that_names_those_it_can(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:secret@127.0.0.1:1/x?sslmode=verify_full")
    result = run(*command.split())
    assert result.exit_code == Exit.USAGE
    assert (
        "DATABASE_URL: sslmode must be one of disable, allow, prefer, require, verify-ca, verify-full."
        in result.output
    )
    assert "secret" not in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["migrate", "status b", "recorder", "worker"])
@pytest.mark.parametrize(
    "option", ["connect_timeout=abc", "connect_timeout=", "keepalives_idle=30s", "tcp_user_timeout=1.5"]
)
def test_a_number_of_a_database_s_that_is_none_is_a_usage_error_that_names_it(
    command: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: EngineConfig(model="never opened")
    )
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:secret@127.0.0.1:{CLOSED_PORT}/x?{option}")
    result = run(*command.split())
    assert result.exit_code == Exit.USAGE
    assert f"DATABASE_URL: {option.partition('=')[0]} must be a whole number." in result.output
    assert "secret" not in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["migrate", "status b", "recorder", "worker"])
def test_a_value_that_libpq_alone_can_judge_is_a_usage_error_too(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: EngineConfig(model="never opened")
    )
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    url = f"postgresql://me:secret@127.0.0.1:{CLOSED_PORT}/x?ssl_min_protocol_version=1.2"
    monkeypatch.setenv("DATABASE_URL", url)
    result = run(*command.split())
    assert result.exit_code == Exit.USAGE
    assert 'DATABASE_URL: invalid "ssl_min_protocol_version" value: "1.2".' in result.output
    assert "secret" not in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@127.0.0.1:1/x",
        "sqlite:///x.db",
        "me:secret@nowhere",
        "postgresql://me:secret@127.0.0.1:port/x",
        "postgresql://me:secret@127.0.0.1:99999/x",
        "postgresql://me:secret@a:1,b:2,c/x?port=1,2",
        "postgresql://me:secret@[::1/x",
        "postgresql://me:%secret@127.0.0.1:1/x",
        "postgresql://me:top@secret@127.0.0.1:1/x",
    ],
)
@pytest.mark.parametrize("command", ["migrate", "migrate --check", "status b", "recorder", "doctor"])
def test_what_is_no_address_of_postgres_is_refused_and_not_quoted(
    command: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    result = run(*command.split())
    assert result.exit_code == (Exit.NOT_READY if command == "doctor" else Exit.USAGE)
    assert "DATABASE_URL" in result.output
    assert "postgresql://" in result.output
    assert "secret" not in result.output


def test_what_postgres_refuses_is_a_defect() -> None:
    assert translate(psycopg.errors.SyntaxError("at or near SELEKT")) is None


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("option", [["--batch", ""], ["--batch", "a\x07b"], ["--idempotency-key", ""]])
def test_a_name_that_no_batch_can_have_is_refused(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    assert run("submit", str(file), *option).exit_code == Exit.USAGE


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", [["submit"], ["local", "run"], ["local", "demo"]])
def test_a_file_without_jobs_is_refused_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text("\n \n")
    result = run(*command, str(file))
    assert result.exit_code == Exit.USAGE
    assert "no jobs" in result.output


@pytest.mark.usefixtures("bare")
def test_a_file_does_not_run_through_a_stack_that_ends_with_another_file(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    state, parent = StateDir(tmp_path), Identity.of("headrace", os.getpid())
    with state.lock():
        state.write(
            Record(parent, passing=True, addresses=Addresses("127.0.0.1:1", "postgresql://me@127.0.0.1:1/x"))
        )
        result = run("local", "run", str(file))
    assert result.exit_code == Exit.REFUSED
    assert "already running" in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["migrate", "migrate --check", "status b"])
@pytest.mark.parametrize(
    "hosts", [f"127.0.0.1:{CLOSED_PORT}", f"127.0.0.1:{CLOSED_PORT},localhost:{CLOSED_PORT}"]
)
def test_a_database_that_is_away_is_unavailable(
    command: str, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "connect_timeout=1&target_session_attrs=read-write"
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:secret@{hosts}/x?{options}")
    result = run(*command.split())
    assert result.exit_code == Exit.UNAVAILABLE
    assert "DATABASE_URL" in result.output
    assert "secret" not in result.output


@pytest.mark.usefixtures("bare")
def test_a_broker_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.context.BROKER_PATIENCE_S", 1.0)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    result = run("topics", "describe")
    assert result.exit_code == Exit.UNAVAILABLE
    assert "KAFKA_BOOTSTRAP_SERVERS" in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_KV_TOKENS", "-4"),
        ("HEADRACE_ALIVE_SECONDS", "inf"),  # no interval in Postgres
        ("HEADRACE_PREFETCH", "100000000"),  # more than librdkafka takes
        ("HEADRACE_TIER__BULK__PREFETCH", "100000000"),
        ("HEADRACE_MAX_SLOTS", "100000000"),
        ("HEADRACE_MAX_RESULT_BYTES", "1"),
    ],
)
def test_a_bad_setting_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    result = run("doctor")
    assert result.exit_code == Exit.USAGE
    assert name in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["topics describe", "status b", "worker", "recorder", "doctor"])
@pytest.mark.parametrize(
    ("brokers", "entry"),
    [
        ("http://kafka:9092", "'http://kafka:9092'"),
        ("kafka", "'kafka'"),
        ("a:9092,b", "'b'"),
        ("a:9092,,b:9092", "''"),
        ("a:9092,", "''"),
        ("a:99999", "'a:99999'"),
        ("a:9092;b:9092", "'a:9092;b:9092'"),
    ],
)
def test_what_is_no_address_of_a_broker_is_refused_by_its_name(
    command: str, brokers: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", brokers)
    result = run(*command.split())
    assert result.exit_code == Exit.USAGE
    assert f"KAFKA_BOOTSTRAP_SERVERS is not usable: {entry} is not host:port" in result.output
    assert "e.g. kafka-1:9092" in result.output


@pytest.mark.usefixtures("bare")
def test_brokers_have_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "a:9092")
    monkeypatch.setenv("HEADRACE_KAFKA_BOOTSTRAP_SERVERS", "b:9092")
    monkeypatch.setenv("HEADRACE_KAFKA_SASL_PASSWORD", "secret")
    result = run("topics", "describe")
    assert result.exit_code == Exit.USAGE
    assert "HEADRACE_KAFKA_BOOTSTRAP_SERVERS is no setting" in result.output
    assert "in KAFKA_BOOTSTRAP_SERVERS" in result.output
    assert "secret" not in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "command", ["submit gone.jsonl", "generate gone.jsonl out", "convert gone out", "local run gone"]
)
def test_a_file_that_is_not_there_is_not_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    result = run(*command.split())
    assert result.exit_code == Exit.NOT_FOUND
    assert "gone" in result.output


@pytest.mark.usefixtures("bare")
def test_an_unknown_tier_is_refused_with_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    result = run("submit", str(file), "--tier", "hurry")
    assert result.exit_code == Exit.USAGE
    assert "interactive, standard, bulk" in result.output


def test_an_unknown_option_is_a_usage_error() -> None:
    assert run("submit", "--speed", "9").exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("status b --json --speed 9", "--speed"),
        ("--bad status b --json", "--bad"),
        ("--json status b", "--json"),
        ("status --json", "BATCH|JOB"),
        ("dlq lisst --json", "lisst"),
        ("nonsense --json", "nonsense"),
        ("generate a b --in-flight none --json", "--in-flight"),
    ],
)
def test_a_usage_error_is_json_with_json(line: str, word: str) -> None:
    result = run(*line.split())
    error = json.loads(result.stderr)["error"]
    assert result.exit_code == error["exit_code"] == Exit.USAGE
    assert word in error["message"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["topics describe", "submit"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_KAFKA_FOO_BAR", "1"),
        ("HEADRACE_KAFKA_MESSAGE_MAX_BYTES", "abc"),
        ("HEADRACE_KAFKA_SECURITY_PROTOCOL", "none"),
    ],
)
def test_a_property_that_kafka_does_not_take_is_a_usage_error(
    command: str, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    monkeypatch.setenv(name, value)
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    result = run(*command.split(), *([str(file)] if command == "submit" else []))
    assert result.exit_code == Exit.USAGE
    assert name in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("properties", "remedy"),
    [
        ({}, "Set HEADRACE_KAFKA_SASL_MECHANISM, e.g. to SCRAM-SHA-512 or PLAIN"),
        ({"SASL_MECHANISM": "PLANE"}, "Set HEADRACE_KAFKA_SASL_MECHANISM, e.g. to SCRAM-SHA-512 or PLAIN"),
        (
            {"SASL_MECHANISM": "PLAIN"},
            "Check HEADRACE_KAFKA_SASL_USERNAME and HEADRACE_KAFKA_SASL_PASSWORD.",
        ),
        (
            {"SECURITY_PROTOCOL": "SSL", "SSL_CA_LOCATION": "/nonexistent"},
            "Check HEADRACE_KAFKA_SSL_CA_LOCATION.",
        ),
    ],
)
def test_a_login_at_kafka_that_lacks_something_names_its_setting(
    properties: dict[str, str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    for name, value in ({"SECURITY_PROTOCOL": "SASL_SSL"} | properties).items():
        monkeypatch.setenv(f"HEADRACE_KAFKA_{name}", value)
    result = run("topics", "describe")
    assert result.exit_code == Exit.USAGE
    assert remedy in result.output


def test_properties_that_exclude_each_other_are_both_named() -> None:
    text = "`max.poll.interval.ms`must be >= `session.timeout.ms`"
    failure = translate(KafkaException(KafkaError(KafkaError._INVALID_ARG, text)))
    assert failure is not None
    assert failure.exit_code is Exit.USAGE
    assert (
        failure.remedy == "Check HEADRACE_KAFKA_MAX_POLL_INTERVAL_MS and HEADRACE_KAFKA_SESSION_TIMEOUT_MS."
    )


def process(stdout: int, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = child_environment(HEADRACE_STATE_DIR=str(home), KAFKA_BOOTSTRAP_SERVERS="", DATABASE_URL="")
    command = [sys.executable, "-m", "headrace", "doctor", *options]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_has_read_enough_ends_a_command_quietly(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = process(writing, tmp_path, *options)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (Exit.PIPE_CLOSED, "")


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        ended = process(full.fileno(), tmp_path, "--json")
    error = json.loads(ended.stderr)["error"]
    assert ended.returncode == error["exit_code"] == Exit.REFUSED
    assert "full" in error["message"]


def _write_to_full_disk(out: IO[bytes]) -> None:
    out.write(b"{}\n")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    target = tmp_path / "results.jsonl"
    with pytest.raises(OSError, match="No space left"), open_output(str(target)) as out:
        _write_to_full_disk(out)
    assert not target.exists()


def test_output_into_a_directory_that_is_not_there_names_the_directory(tmp_path: Path) -> None:
    with (
        pytest.raises(Failure, match=r"There is no directory .*gone\.$"),
        open_output(str(tmp_path / "gone" / "x")),
    ):
        pass


def test_a_place_that_takes_no_file_is_named() -> None:
    for number, exit_code in ((errno.EROFS, Exit.REFUSED), (errno.ENOTDIR, Exit.USAGE)):
        failure = translate(OSError(number, os.strerror(number), "there/out.jsonl"))
        assert failure is not None
        assert failure.exit_code is exit_code
        assert "there/out.jsonl" in failure.message


@pytest.mark.usefixtures("bare")
def test_generate_into_a_directory_that_is_not_there_names_the_directory(tmp_path: Path) -> None:
    source = tmp_path / "jobs.jsonl"
    source.write_text('{"prompt": "hello"}\n')
    result = run("generate", str(source), str(tmp_path / "gone" / "out.jsonl"))
    assert result.exit_code == Exit.NOT_FOUND
    assert "There is no directory" in result.output


def test_an_error_that_is_a_sentence_is_left_as_one() -> None:
    failure = translate(FileExistsError("out.jsonl holds results of another input than in.jsonl"))
    assert failure is not None
    assert failure.message == "out.jsonl holds results of another input than in.jsonl"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["worker", "recorder", "doctor"])
def test_a_misspelt_setting_is_told_and_stops_nobody(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PREFTCH", "5")
    monkeypatch.setattr("headrace.cli.serve.worker_config", lambda settings: WorkerConfig("127.0.0.1:1"))
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: context.bootstrap_servers(settings)
    )
    result = run(command)
    assert result.exit_code == Exit.NOT_READY  # there are no addresses
    assert "HEADRACE_PREFTCH is no setting and changes nothing: HEADRACE_PREFETCH is one." in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["worker", "recorder"])
def test_a_database_that_is_not_migrated_starts_nothing(
    command: str, postgres_server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: EngineConfig(model="never opened")
    )
    with postgres.empty(postgres_server) as url:
        monkeypatch.setenv("DATABASE_URL", url)
        result = run(command)
    assert result.exit_code == Exit.NOT_READY
    assert "The database has no Headrace tables." in result.output
    assert "Run `headrace migrate`." in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["worker", "recorder"])
def test_a_database_that_was_away_at_the_start_and_is_not_migrated_starts_nothing(
    command: str, postgres_server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if postgres_server.process is None:
        pytest.skip("the server named by HEADRACE_TEST_DATABASE_URL is not ours to stop")

    def away_once(url: str) -> None:
        try:
            require_migrated(url)
        except LedgerUnavailable:
            postgres_server.start()
            raise

    monkeypatch.setattr("headrace.ledger.require_migrated", away_once)
    monkeypatch.setattr("headrace.cli.serve.ASK_AGAIN_S", 0.0)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: EngineConfig(model="never opened")
    )
    with postgres.empty(postgres_server) as url:
        monkeypatch.setenv("DATABASE_URL", url)
        postgres_server.halt()
        result = run(command)
    assert result.exit_code == Exit.NOT_READY
    assert "waiting for Postgres: The database cannot be reached" in result.output
    assert "The database has no Headrace tables." in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("command", "made"), [("worker", "worker.Worker"), ("recorder", "ledger.recorder.Recorder.run")]
)
def test_what_is_stopped_while_it_waits_for_a_database_takes_nothing(
    command: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(url: str) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise LedgerUnavailable("connection refused")

    def take(*_: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr("headrace.ledger.require_migrated", away)
    monkeypatch.setattr(f"headrace.{made}", take)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me@127.0.0.1:{CLOSED_PORT}/x")
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: EngineConfig(model="never opened")
    )
    result = run(command)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["worker", "recorder"])
def test_with_json_all_that_a_process_which_stays_says_is_json(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PREFTCH", "5")
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "text")
    monkeypatch.setattr("headrace.cli.serve.worker_config", lambda settings: WorkerConfig("127.0.0.1:1"))
    monkeypatch.setattr(
        "headrace.cli.serve.engine_config", lambda settings: context.bootstrap_servers(settings)
    )
    warning, error = map(json.loads, run(command, "--json").stderr.splitlines())
    assert "HEADRACE_PREFTCH is no setting" in warning["event"]
    assert error["error"]["exit_code"] == Exit.NOT_READY


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        ("model", "HEADRACE_MODEL", "/nonexistent"),
        ("model", "HEADRACE_MODEL", "./gone"),
        ("gpu", "HEADRACE_DEVICE", "gpu"),
        ("settings", "HEADRACE_CHAT_TEMPLATE", "/nonexistent"),
    ],
)
def test_doctor_says_no_where_a_worker_would(
    check: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    result = run("doctor", "--json")
    (finding,) = [each for each in json.loads(result.stdout)["findings"] if each["check"] == check]
    assert finding["ok"] is False
    assert finding["remedy"]
    assert name in finding["detail"] + finding["remedy"]
    assert result.exit_code == Exit.NOT_READY


@pytest.mark.usefixtures("bare")
def test_doctor_says_once_what_is_away_and_names_what_it_did_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("broker", "topics", "sizes", "database", "migrations", "workers")
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in names})
    monkeypatch.setattr("headrace.cli.context.BROKER_PATIENCE_S", 2.0)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{CLOSED_PORT}")
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me@127.0.0.1:{CLOSED_PORT}/x")
    result = run("doctor", "--json")
    assert result.exit_code == Exit.NOT_READY
    found = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
    assert {name for name in names if found[name]["ok"] is False} == {"broker", "database"}
    assert found["broker"]["remedy"] == "Check KAFKA_BOOTSTRAP_SERVERS and that the broker is up."
    for name, needed in doctor.NEEDS.items():
        assert (found[name]["ok"], found[name]["detail"]) == (None, f"not tried: it needs the {needed}")


@pytest.mark.usefixtures("bare")
def test_doctor_says_no_to_a_card_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: "a card",
    }
    for name, told in cards.items():
        monkeypatch.setattr(torch.cuda, name, told)
    monkeypatch.setattr(doctor, "CHECKS", {"gpu": doctor.CHECKS["gpu"]})
    monkeypatch.setenv("HEADRACE_DEVICE", "cuda:1")
    assert run("doctor").exit_code == 0
    monkeypatch.setenv("HEADRACE_DEVICE", "cuda:2")
    result = run("doctor")
    assert result.exit_code == Exit.NOT_READY
    assert "device 'cuda:2' was asked for, and the last is cuda:1" in result.output
    assert "Set HEADRACE_DEVICE" in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADRACE_KV_TOKENS", "10", "raise kv_tokens (HEADRACE_KV_TOKENS)"),
        ("HEADRACE_TIER__BULK__FLOOR", "0.99", "the tiers' floors must add up to 1 at most"),
        ("HEADRACE_KAFKA_FOO_BAR", "1", "Check HEADRACE_KAFKA_FOO_BAR."),
        ("HEADRACE_KAFKA_", "1", "Check HEADRACE_KAFKA_<NAME>."),
        ("HEADRACE_KAFKA_SESSION_TIMEOUT_MS", "9999999", "allowed range 1..3600000."),
        # The one a consumer alone refuses, the other a producer.
        ("HEADRACE_KAFKA_SESSION_TIMEOUT_MS", "700000", "and HEADRACE_KAFKA_SESSION_TIMEOUT_MS."),
        ("HEADRACE_KAFKA_MESSAGE_TIMEOUT_MS", "1", "Check HEADRACE_KAFKA_MESSAGE_TIMEOUT_MS and"),
    ],
)
def test_doctor_and_a_worker_that_does_not_start_say_the_same(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"settings": doctor.CHECKS["settings"]})
    for variable, set_to in (
        (name, value),
        ("HEADRACE_MODEL", "never/opened"),
        ("KAFKA_BOOTSTRAP_SERVERS", "a:1"),
    ):
        monkeypatch.setenv(variable, set_to)
    for command, exit_code in (("doctor", Exit.NOT_READY), ("worker", Exit.USAGE)):
        result = run(command)
        assert result.exit_code == exit_code
        assert said in result.output


@pytest.mark.usefixtures("bare")
def test_doctor_says_no_to_a_property_that_only_the_producer_of_commands_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"settings": doctor.CHECKS["settings"]})
    monkeypatch.setenv("HEADRACE_KAFKA_ACKS", "1")  # a worker sets it itself
    result = run("doctor")
    assert result.exit_code == Exit.NOT_READY
    assert "Check HEADRACE_KAFKA_ACKS and HEADRACE_KAFKA_ENABLE_IDEMPOTENCE." in result.output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["doctor", "worker", "recorder"])
@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("HEADRACE_KAFKA_GROUP_ID", "mine", "groups are named after HEADRACE_TOPIC_PREFIX"),
        ("HEADRACE_KAFKA_AUTO_OFFSET_RESET", "latest", "a new group begins with the oldest job"),
    ],
)
def test_workers_and_recorder_are_not_put_in_one_group_and_begin_with_the_oldest_job(
    command: str, variable: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    result = run(command)
    assert result.exit_code == Exit.USAGE
    assert f"{variable} is no setting: {why}" in result.output


@pytest.mark.usefixtures("bare")
def test_a_recorder_tells_of_a_property_before_it_waits_for_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    monkeypatch.setenv("HEADRACE_KAFKA_FOO_BAR", "1")
    result = run("recorder")
    assert result.exit_code == Exit.USAGE
    assert "Check HEADRACE_KAFKA_FOO_BAR." in result.output


@pytest.mark.usefixtures("bare")
def test_a_worker_does_not_wait_unheard_for_partitions_of_an_embedded_broker_without_its_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"settings": doctor.CHECKS["settings"]})
    monkeypatch.setenv("HEADRACE_GROUP_PROTOCOL", "consumer")
    said = "does not know HEADRACE_GROUP_PROTOCOL=consumer"
    parent = Identity.of("headrace", os.getpid())
    there = Addresses("127.0.0.1:1", "postgresql://h/d", {"session.timeout.ms": "6000"})
    StateDir(tmp_path).write(Record(parent, addresses=there))
    for command, exit_code in (("doctor", Exit.NOT_READY), ("worker", Exit.USAGE)):
        result = run(command)
        assert result.exit_code == exit_code
        assert said in result.output
    # A stack that was started at a broker of the user's own says nothing of it.
    StateDir(tmp_path).write(Record(parent, addresses=replace(there, kafka={})))
    assert said not in run("doctor").output


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", ["local run FILE", "local demo FILE", "local up"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADRACE_KV_TOKENS", "10", "raise kv_tokens (HEADRACE_KV_TOKENS)"),
        ("HEADRACE_TIER__BULK__FLOOR", "0.99", "Lower HEADRACE_TIER__INTERACTIVE__FLOOR"),
        ("HEADRACE_CHAT_TEMPLATE", "/nonexistent", "HEADRACE_CHAT_TEMPLATE"),
        ("HEADRACE_KAFKA_SESSION_TIMEOUT_MS", "700000", "HEADRACE_KAFKA_SESSION_TIMEOUT_MS"),
        ("HEADRACE_GROUP_PROTOCOL", "consumer", "does not know HEADRACE_GROUP_PROTOCOL=consumer"),
    ],
)
def test_no_stack_is_started_whose_worker_never_would(
    command: str, name: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_MODEL", "never/opened")
    result = run(*command.replace("FILE", str(file)).split())
    assert result.exit_code == Exit.USAGE
    assert said in result.output
    assert [path.name for path in tmp_path.iterdir()] == [
        "jobs.jsonl"
    ]  # the state's directory, and nothing of a stack


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("absent", ["config.json", "model.safetensors", "tokenizer.json"])
def test_doctor_says_no_to_a_model_of_which_a_part_is_missing(
    absent: str, smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in smollm.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.setenv("HEADRACE_MODEL", str(tmp_path))
    monkeypatch.setattr(doctor, "CHECKS", {"model": doctor.CHECKS["model"]})
    assert run("doctor").exit_code == 0
    (tmp_path / absent).unlink()
    result = run("doctor", "--json")
    (finding,) = json.loads(result.stdout)["findings"]
    assert absent in finding["detail"]
    assert "HEADRACE_MODEL" in finding["remedy"]
    assert result.exit_code == Exit.NOT_READY


@pytest.mark.usefixtures("bare")
def test_doctor_says_no_to_a_context_that_the_model_does_not_take(
    smollm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"model": doctor.CHECKS["model"]})
    monkeypatch.setenv("HEADRACE_MODEL", str(smollm))
    monkeypatch.setenv("HEADRACE_MAX_CONTEXT", "8193")
    result = run("doctor")
    assert result.exit_code == Exit.NOT_READY
    assert "the model takes 8,192 tokens at most" in result.output
    monkeypatch.setenv("HEADRACE_MAX_CONTEXT", "8192")
    assert run("doctor").exit_code == 0


@pytest.mark.usefixtures("bare")
def test_a_setting_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TIER", "xx")
    result = run("doctor")
    assert result.exit_code == Exit.USAGE
    assert "HEADRACE_TIER is not usable: it must be a JSON object." in result.output


def test_what_others_wrote_is_not_drawn_as_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    note("broker thrd:a:1 refused")
    fields({"value": "thrd:a:1"})
    assert "".join(capsys.readouterr()).count("thrd:a:1") == 2


def test_what_others_wrote_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    fields({"value": "\x1b[2Jred\x9band\nblue\x7f"})
    assert capsys.readouterr().out == "value  \\x1b[2Jred\\x9band\nblue\\x7f\n"


@pytest.mark.usefixtures("bare")
def test_doctor_gives_a_remedy_for_everything_that_is_missing() -> None:
    result = run("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.exit_code == Exit.NOT_READY
    missing = {check for check, finding in findings.items() if finding["ok"] is False}
    assert missing == {"broker", "database"}
    assert all(findings[check]["remedy"] for check in missing)
