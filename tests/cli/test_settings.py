"""The environment is read in one place, and says what it means."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from headrace.cli import app, context
from headrace.cli.engine import engine_config
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.ledger.recorder import Recorder
from headrace.local.child import Identity
from headrace.local.state import Addresses, Record, StateDir
from headrace.settings import Settings, TierSettings, child_environment, variable

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields:
        monkeypatch.delenv(variable(field), raising=False)


def test_other_tools_names_are_kept_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "a:1,b:2")
    monkeypatch.setenv("DATABASE_URL", "postgresql://h/d")
    settings = Settings()
    assert (settings.kafka_bootstrap_servers, settings.database_url) == ("a:1,b:2", "postgresql://h/d")


def test_the_engine_is_set_up_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODEL", "some/model")
    assert not engine_config(Settings()).batch_invariant
    monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", "true")
    assert engine_config(Settings()).batch_invariant


def test_the_recorder_keeps_the_table_for_as_many_days_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}

    class Told(Recorder):
        def __init__(self, *_: object, keep: timedelta, **__: object) -> None:
            told["keep"] = keep
            raise Failure(Exit.REFUSED, "That is enough.")

    monkeypatch.setattr("headrace.ledger.recorder.Recorder", Told)
    monkeypatch.setenv("DATABASE_URL", "postgresql://me@127.0.0.1:1/x")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("HEADRACE_KEEP_DAYS", "400")
    assert CliRunner().invoke(app, ["recorder"]).exit_code == Exit.REFUSED
    assert told == {"keep": timedelta(days=400)}


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODEL", "")
    monkeypatch.setenv("HEADRACE_KV_TOKENS", "")
    assert (Settings().model, Settings().kv_tokens) == (None, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "level"),
    [
        (None, "debug", "debug"),
        ("error", "debug", "error"),
        ("", "WARNING", "warning"),
        (None, "WARN", "warning"),
        (None, "critical", "error"),
        (None, "20", "info"),
        (None, None, "info"),
    ],
)
def test_the_log_level_has_the_name_that_others_use_too(
    ours: str | None, theirs: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    for name, value in (("HEADRACE_LOG_LEVEL", ours), ("LOG_LEVEL", theirs)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert Settings().log_level == level
    assert Settings(log_level="error").log_level == "error"


def test_a_log_level_that_is_none_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "loud")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == Exit.USAGE
    assert (
        "HEADRACE_LOG_LEVEL is not usable: Input should be 'debug', 'info', 'warning' or 'error'"
        in result.output
    )
    assert "It is 'loud' now." in result.output


def test_tiers_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TIERS", "fast, slow")
    assert Settings().tiers == ("fast", "slow")


def test_no_tiers_at_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TIERS", ",")
    with pytest.raises(ValidationError, match="at least one tier"):
        Settings()


def test_each_knob_of_a_tier_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TIERS", "fast,very-slow")
    monkeypatch.setenv("HEADRACE_TIER__VERY_SLOW__FLOOR", "0.2")
    monkeypatch.setenv("HEADRACE_TIER__VERY_SLOW__PREEMPTS", "false")
    monkeypatch.setenv("HEADRACE_TIER__FAST__TENANT_LIMIT", "8")
    settings = Settings()
    assert settings.of_tier("very-slow") == TierSettings(floor=0.2, preempts=False)
    assert settings.of_tier("fast").tenant_limit == 8


def test_the_variable_that_is_wrong_can_be_named() -> None:
    assert variable("tier", "bulk", "floor") == "HEADRACE_TIER__BULK__FLOOR"


def test_a_knob_of_no_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TIER__BULC__FLOOR", "0.2")
    with pytest.raises(ValidationError, match=r"BULC.*interactive, standard, bulk"):
        Settings()


def test_kafka_properties_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("HEADRACE_KAFKA_SESSION_TIMEOUT_MS", "6000")
    assert Settings().kafka == {"security.protocol": "SASL_SSL", "session.timeout.ms": "6000"}


def test_who_joins_a_group_at_a_stacks_own_broker_takes_its_properties_below_what_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Addresses("127.0.0.1:1", "postgresql://h/d", {"session.timeout.ms": "6000"})
    StateDir(tmp_path).write(Record(Identity.of("headrace", os.getpid()), addresses=there))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    assert context.group_member(Settings()) == {"session.timeout.ms": "6000"}
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")  # as `headrace local up` prints it
    assert context.group_member(Settings()) == {"session.timeout.ms": "6000"}
    monkeypatch.setenv("HEADRACE_KAFKA_SESSION_TIMEOUT_MS", "9000")
    assert context.group_member(Settings()) == {"session.timeout.ms": "9000"}
    monkeypatch.delenv("HEADRACE_KAFKA_SESSION_TIMEOUT_MS")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "kafka:9092")
    assert context.group_member(Settings()) == {}


def test_blanks_around_a_broker_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", " a:1 , [::1]:9092 ")
    assert Settings().kafka_bootstrap_servers == "a:1,[::1]:9092"


def test_an_empty_kafka_property_counts_as_unset_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA_SASL_PASSWORD", "")
    assert Settings().kafka == {}


def test_a_misspelt_variable_is_told_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_PREFTCH", "HEADRACE_TIER_BULK_FLOOR", "HEADRACE_SOMETHING_ELSE"):
        monkeypatch.setenv(name, "5")
    found = {name: meant for name, meant in Settings().unknown_variables().items() if "_TEST_" not in name}
    assert found == {
        "HEADRACE_PREFTCH": "HEADRACE_PREFETCH",
        "HEADRACE_SOMETHING_ELSE": None,
        "HEADRACE_TIER_BULK_FLOOR": "HEADRACE_TIER__BULK__FLOOR",
    }


def test_nothing_that_sets_something_is_called_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HEADRACE_KAFKA_LINGER_MS",
        "HEADRACE_TIER__BULK__WEIGHT",
        "headrace_prefetch",
        "HEADRACE_KEEP_DAYS",
    ):
        monkeypatch.setenv(name, "5")
    assert [
        name for name in Settings().unknown_variables() if "_TEST_" not in name and "VENV" not in name
    ] == []


def test_an_option_of_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEVICE", "cuda")
    assert Settings(device="cpu").device == "cpu"


def test_a_childs_environment_is_ours_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEVICE", "cpu")
    environment = child_environment(DATABASE_URL="postgresql://x")
    assert (environment["HEADRACE_DEVICE"], environment["DATABASE_URL"]) == ("cpu", "postgresql://x")


def test_nothing_else_reads_the_environment() -> None:
    """Two places look up the user's cache folder and the host's name for the temporary files: no settings of ours."""
    reads = re.compile(r"environ\b|getenv\(")
    allowed = {"headrace/settings.py", "headrace/local/model.py"}
    folders = ("headrace/cli", "headrace/local", "schemas", "ledger", "worker", "client")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if reads.search(path.read_text())}
    assert found <= allowed
