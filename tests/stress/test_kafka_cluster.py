"""A cluster of three brokers loses one after the other: whoever leads, coordinates or controls, the work goes on."""

import json
from collections.abc import Iterator

import apache_kafka
import pytest
from fleet import Fleet, fleet
from kafka_cluster import NODES, KafkaCluster
from typer.testing import CliRunner
from waiting import eventually

from headrace.cli import app
from headrace.worker import WorkerConfig

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]

JOBS = 900  # before each kill
MEANWHILE = 300  # while a node is away
# No worker is killed here, so none may be taken for dead: whatever is run a second time is a mistake.
PATIENT = {"alive_s": 120.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    jars = apache_kafka.jar_directory()
    if jars is None:
        pytest.skip("needs Apache Kafka's jars")
    made = KafkaCluster(jars)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize(("asked", "copies"), [((), len(NODES)), (("--replication", "2"), 2)])
def test_topics_have_as_many_copies_as_the_operator_says(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], copies: int
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", cluster.bootstrap)
    monkeypatch.setenv("HEADRACE_TOPIC_PREFIX", f"copies{copies}")
    made = CliRunner().invoke(app, ["topics", "create", *asked])
    assert made.exit_code == 0, made.output
    eventually(lambda: copies_of_each_topic() == [copies] * 6)  # not every broker hears of them at once


def copies_of_each_topic() -> list[int | None]:
    described = json.loads(CliRunner().invoke(app, ["topics", "describe", "--json"]).stdout)
    return [topic["replication"] for topic in described]


@pytest.mark.parametrize("protocol", ["classic", "consumer"], indirect=True)
def test_whichever_node_is_killed_the_work_goes_on(
    cluster: KafkaCluster, database_url: str, protocol: str
) -> None:
    with fleet(cluster.bootstrap, database_url, group_protocol=protocol, **PATIENT) as made:
        made.start(workers=2)
        for chosen in (busiest_leader, coordinator, controller):
            made.send(JOBS)
            made.wait_ended(len(made.expected) - JOBS // 2)
            node = chosen(cluster, made)
            with cluster.nodes[node].away():
                cluster.await_without(node)
                made.send(MEANWHILE)
                made.wait_ended(len(made.expected) - JOBS // 2)
            cluster.await_whole()
        made.settle()
        made.assert_books_balance()


def busiest_leader(cluster: KafkaCluster, made: Fleet) -> int:
    return cluster.busiest_leader(made.line.topics.all)


def coordinator(cluster: KafkaCluster, made: Fleet) -> int:
    group = WorkerConfig(cluster.bootstrap, made.line.topics).consumer("standard")["group.id"]
    return cluster.coordinator(group)


def controller(cluster: KafkaCluster, made: Fleet) -> int:
    return cluster.controller()
