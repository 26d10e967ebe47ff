"""A broker and a database that let nobody in without TLS and a login: everything works with the settings that
docs/operations.md names, and without them says what is missing."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import apache_kafka
import certificates
import guarded_kafka
import guarded_postgres
import postgres
import pytest
from certificates import Certificates
from guarded_kafka import GuardedKafka
from standin import StandInEngine
from typer.testing import CliRunner, Result

from headrace.cli import app, context, doctor
from headrace.cli.exits import Exit
from headrace.cli.serve import worker_config
from headrace.client import Client
from headrace.ledger import Ledger
from headrace.ledger.recorder import Recorder
from headrace.schemas import JobState
from headrace.worker import Worker

T = TypeVar("T")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates that only this module trusts."""
    return certificates.issue(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded_broker(authority: Certificates) -> Iterator[GuardedKafka]:
    """An Apache Kafka with TLS, logins and client certificates, and nothing else."""
    if apache_kafka.jar_directory() is None:
        pytest.skip("Apache Kafka's jars could not be resolved")
    broker = GuardedKafka(authority)
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def guarded_database(authority: Certificates) -> Iterator[postgres.Server]:
    """A Postgres with TLS and passwords, and nothing else."""
    installed = guarded_postgres.installation()
    if installed is None:
        pytest.skip("a Postgres with TLS could not be resolved")
    server = guarded_postgres.server(installed, authority)
    yield server
    server.stop()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without a word of ours."""
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))


def ask(command: Callable[[], T], knows: Callable[[T], bool]) -> T:
    """What a command says that soon gives up, or later where a slow machine has not learned of the reason by then."""
    for patience in (2.5, 10.0, 40.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headrace.cli.context.BROKER_PATIENCE_S", patience)
            patch.setattr("headrace.client.outbox._PATIENCE_S", patience)
            said = command()
        if knows(said):
            break
    return said


def login(
    monkeypatch: pytest.MonkeyPatch, bootstrap: str, properties: dict[str, str], **changes: str
) -> None:
    """Put a broker's address and librdkafka's properties into the environment, as an operator would."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", bootstrap)
    for name, value in {**properties, **changes}.items():
        monkeypatch.setenv(f"HEADRACE_KAFKA_{name.upper().replace('.', '_')}", value)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def findings(*names: str) -> list[dict[str, object]]:
    """What the doctor says of these checks; the others cost seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in names})
        found: list[dict[str, object]] = json.loads(run("doctor", "--json").stdout)["findings"]
    return found


@contextmanager
def serving() -> Iterator[None]:
    """A recorder and a worker, made from the environment as the commands make them, but with the stand-in engine."""
    settings = context.load_settings()
    stop = threading.Event()
    with Ledger(context.database_url(settings)) as ledger:
        bootstrap, topics = context.bootstrap_servers(settings), context.topics(settings)
        parts = [
            Recorder(bootstrap, topics, ledger, kafka=settings.kafka),
            Worker(worker_config(settings), StandInEngine, ledger),
        ]
        threads = [threading.Thread(target=part.run, args=(stop,)) for part in parts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("way", ["SCRAM-SHA-512", "PLAIN", "certificate"])
def test_a_batch_runs_from_end_to_end_through_locked_doors(
    way: str,
    guarded_broker: GuardedKafka,
    guarded_database: postgres.Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if way == "certificate":
        login(monkeypatch, guarded_broker.bootstrap_mtls, guarded_broker.certificate)
    else:
        login(monkeypatch, guarded_broker.bootstrap, guarded_broker.login, **{"sasl.mechanism": way})
    monkeypatch.setenv("HEADRACE_TOPIC_PREFIX", f"t-{way.lower()}")
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(json.dumps({"custom_id": f"c{n}", "prompt": f"p{n}"}) + "\n" for n in range(20)))
    with postgres.empty(guarded_database) as url:
        monkeypatch.setenv("DATABASE_URL", url)
        assert run("migrate").exit_code == 0
        assert run("topics", "create", "--partitions", "2").exit_code == 0
        with serving():
            submitted = run("submit", str(file), "--batch", "b")
            assert submitted.exit_code == 0, submitted.output
            topics = context.topics(context.load_settings())
            with Client(guarded_broker.bootstrap, topics, kafka=guarded_broker.login) as client:
                followed = list(client.follow_results("b", idle_timeout=120))
        assert [result.state for result in followed] == [JobState.SUCCEEDED] * 20
        assert run("results", "b").stdout.count("echo: p") == 20
        bad = [found for found in findings("broker", "topics", "database", "migrations") if not found["ok"]]
        assert bad == []


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("changes", "told", "remedy"),
    [
        ({"security.protocol": "PLAINTEXT"}, "Disconnected", "security.protocol"),
        ({"sasl.password": "guess"}, "invalid credentials", "sasl.password"),
        ({"sasl.mechanism": "SCRAM-SHA-256"}, "SCRAM-SHA-512", "sasl.mechanism"),
        ({"ssl.ca.location": ""}, "certificate verify failed", "ssl.ca.location"),
        ({"security.protocol": "SSL"}, "closed by peer", "SASL_SSL"),
    ],
)
def test_a_broker_that_lets_nobody_in_is_told_with_the_setting_at_fault(
    changes: dict[str, str],
    told: str,
    remedy: str,
    guarded_broker: GuardedKafka,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    login(monkeypatch, guarded_broker.bootstrap, guarded_broker.login, **changes)
    if not changes.get("ssl.ca.location", "set"):
        monkeypatch.delenv("HEADRACE_KAFKA_SSL_CA_LOCATION")
    result = ask(lambda: run("topics", "describe", "--json"), lambda result: told in result.output)
    error = json.loads(result.stderr)["error"]
    assert result.exit_code == Exit.UNAVAILABLE
    assert told in error["message"]
    assert remedy in error["remedy"]
    assert guarded_kafka.PASSWORD not in result.output
    (broker,) = ask(lambda: findings("broker"), lambda found: found[0]["remedy"] == error["remedy"])
    assert (broker["ok"], broker["remedy"]) == (False, error["remedy"])


@pytest.mark.usefixtures("bare")
def test_a_client_without_a_certificate_is_told_so(
    guarded_broker: GuardedKafka, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    properties = {name: value for name, value in guarded_broker.certificate.items() if name.count(".") < 2}
    login(monkeypatch, guarded_broker.bootstrap_mtls, properties)
    monkeypatch.setenv("HEADRACE_KAFKA_SSL_CA_LOCATION", guarded_broker.certificate["ssl.ca.location"])
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    setting = "ssl.certificate.location"
    result = ask(lambda: run("submit", str(file)), lambda result: setting in " ".join(result.output.split()))
    assert result.exit_code == Exit.UNAVAILABLE
    assert setting in " ".join(result.output.split())


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("options", "password", "remedy"),
    [
        ("sslmode=disable", guarded_postgres.PASSWORD, "sslmode=verify-full"),
        ("sslmode=require", "guess", "password"),
        ("sslmode=verify-full&sslrootcert=system", guarded_postgres.PASSWORD, "sslrootcert"),
    ],
)
def test_a_database_that_lets_nobody_in_is_told_with_the_option_at_fault(
    options: str,
    password: str,
    remedy: str,
    guarded_database: postgres.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = urlsplit(guarded_database.url).port
    url = f"postgresql://{postgres.USER}:{password}@localhost:{port}/postgres?{options}"
    monkeypatch.setenv("DATABASE_URL", url)
    result = run("migrate", "--json")
    assert result.exit_code == Exit.UNAVAILABLE, result.output
    assert remedy in json.loads(result.stderr)["error"]["remedy"]
    assert password not in result.output
    (database,) = findings("database")
    assert database["ok"] is False
    assert remedy in str(database["remedy"])
