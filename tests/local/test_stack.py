"""The stack as a whole: up, through, down, interrupted, killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psutil
import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from headrace.cli.exits import Exit
from headrace.local import broker, database
from headrace.local.errors import Interrupted
from headrace.local.stack import Stack
from headrace.local.state import Record, StateDir
from headrace.settings import Settings

PROMPTS = [
    {
        "custom_id": "good",
        "prompt": "The capital of France is",
        "sampling": {"max_tokens": 4, "temperature": 0},
    },
    {"custom_id": "bad", "prompt": "The capital of Spain is", "sampling": {"max_tokens": "four"}},
]


def wait_until(ready: object, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def alive(state: StateDir) -> list[str]:
    return [child.name for child in state.read().children if child.find()]


@pytest.fixture
def environment(tmp_path: Path, smollm: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL")
    }
    return kept | {"HEADRACE_STATE_DIR": str(tmp_path / "state"), "HEADRACE_MODEL": str(smollm)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "headrace", *arguments]


@contextmanager
def local_up(environment: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        command("local", "up", "--json"),
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)


def test_the_broker_takes_connections_and_ends(tmp_path: Path) -> None:
    port = broker.free_port()
    child = broker.start(tmp_path / "broker.log", port)
    try:
        broker.wait_ready(child, port, Event())
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        assert len(admin.list_topics(timeout=60).brokers) == 1
    finally:
        child.stop()
    assert child.popen.returncode is not None


def test_the_database_takes_connections_and_leaves_nothing(tmp_path: Path) -> None:
    home = database.make_home()
    child = database.start(home, tmp_path / "database.log", Event())
    try:
        database.wait_ready(child, home, Event())
        with psycopg.connect(database.url(home)) as connection:
            assert connection.info.server_version >= 140_000
    finally:
        child.stop()
        database.remove(home)
    assert not home.exists()


def test_nobody_else_can_enter_the_database(tmp_path: Path) -> None:
    home = database.make_home()
    try:
        assert home.stat().st_mode & 0o077 == 0
    finally:
        database.remove(home)


@pytest.mark.parametrize("moment", [1, 2])
def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path, moment: int) -> None:
    """The first report comes from the broker, the second from the database: stop right after it."""
    stop, state, records = Event(), StateDir(tmp_path), list[Record]()

    def report(text: str) -> None:
        records.append(state.read())
        if len(records) == moment:
            stop.set()

    settings = Settings(state_dir=tmp_path, kafka_bootstrap_servers=None, database_url=None)
    with pytest.raises(Interrupted), Stack(settings, stop, report) as stack:
        stack.start()
    started = records[-1]
    assert len(started.children) >= moment
    assert not [child.name for child in started.children if child.find()]
    assert not any(Path(home).exists() for home in started.homes)


@pytest.mark.timeout(600)
def test_a_file_runs_through_a_stack_started_for_it(tmp_path: Path, environment: dict[str, str]) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    done = subprocess.run(
        command("local", "run", str(file), "-o", str(output), "--json"),
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["batch"]["succeeded"], summary["batch"]["failed"], summary["written"]) == (1, 1, 2)
    results = {line["custom_id"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert "Paris" in results["good"]["choices"][0]["text"]
    assert "sampling.max_tokens" in results["bad"]["error"]["message"]
    assert not (tmp_path / "state" / "stack.json").exists()


@pytest.mark.timeout(600)
def test_a_killed_stack_is_cleaned_up_by_the_next(tmp_path: Path, environment: dict[str, str]) -> None:
    state = StateDir(tmp_path / "state")
    with local_up(environment) as first:
        wait_until(lambda: "database" in alive(state))
        first.kill()
        first.wait()
    left, homes = state.read().children, state.read().homes
    assert [child.name for child in left if child.find()]
    with local_up(environment):
        wait_until(lambda: state.read().parent is not None and state.read().parent.find() and alive(state))  # type: ignore[union-attr]
        assert not [child.name for child in left if child.find()]
        assert not any(Path(home).exists() for home in homes)
    assert alive(state) == []


@pytest.mark.timeout(600)
def test_down_stops_a_stack_and_what_a_killed_one_left(tmp_path: Path, environment: dict[str, str]) -> None:
    state = StateDir(tmp_path / "state")

    def down() -> dict[str, object]:
        done = subprocess.run(
            command("local", "down", "--json"), env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    assert down() == {"stopped": False, "cleaned_up": []}
    with local_up(environment) as first:
        wait_until(lambda: "database" in alive(state))
        assert down() == {"stopped": True, "cleaned_up": []}
        assert first.wait(timeout=240) == Exit.INTERRUPTED
    with local_up(environment) as second:
        wait_until(lambda: "database" in alive(state))
        second.kill()
        second.wait()
    assert {"database", "broker"} <= set(down()["cleaned_up"])  # type: ignore[call-overload]
    assert alive(state) == []


@pytest.mark.timeout(900)
def test_a_worker_that_dies_is_started_again_and_answers_a_plain_kafka_message(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    state = StateDir(tmp_path / "state")
    with local_up(environment) as stack:
        wait_until(state.running)
        addresses = state.running()
        assert addresses is not None
        assert addresses.kafka == broker.GROUP_MEMBER
        worker = next(child for child in state.read().children if child.name == "worker")
        psutil.Process(worker.pid).kill()
        wait_until(lambda: alive(state).count("worker") == 1 and worker.find() is None)
        # A producer that knows Kafka and nothing of Headrace.
        producer = Producer({"bootstrap.servers": addresses.kafka_bootstrap_servers})
        producer.produce(
            "headrace.jobs.v1.standard", b'{"prompt": "The largest planet is", "sampling": {"max_tokens": 4}}'
        )
        producer.flush()
        with psycopg.connect(addresses.database_url, autocommit=True) as connection:
            query = "SELECT state FROM job_status"
            wait_until(lambda: connection.execute(query).fetchall() == [("succeeded",)], timeout_s=300)
        stack.send_signal(signal.SIGTERM)
        stack.wait(timeout=240)
    assert stack.returncode == 0
    assert alive(state) == []
