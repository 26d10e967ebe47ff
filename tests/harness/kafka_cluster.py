"""Three Apache Kafka nodes, each broker and controller, and each record on all three: a cluster that may lose one."""

import contextlib
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_kafka
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from waiting import eventually

NODES = (1, 2, 3)
JVM_FLAGS = ("-Xms128m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
# As operations.md asks of a cluster: a record that was confirmed is on two nodes at least, whichever of them is killed.
COPIES = {
    "default.replication.factor": 3,
    "min.insync.replicas": 2,
    "offsets.topic.replication.factor": 3,
    "transaction.state.log.replication.factor": 3,
    "transaction.state.log.min.isr": 2,
    "share.coordinator.state.topic.replication.factor": 3,
    "share.coordinator.state.topic.min.isr": 2,
}


class KafkaCluster:
    """The nodes, by their ids, and who does what among them. ``stop`` ends them all."""

    def __init__(self, jars: Path) -> None:
        ports = apache_kafka.free_ports(2 * len(NODES))
        brokers = dict(zip(NODES, ports[: len(NODES)], strict=True))
        controllers = dict(zip(NODES, ports[len(NODES) :], strict=True))
        voters = ",".join(f"{id}@127.0.0.1:{port}" for id, port in controllers.items())

        def prepared(id: int) -> apache_kafka.Broker:
            settings = {
                **apache_kafka.node(controllers[id]),
                **apache_kafka.plain_listeners(brokers[id], controllers[id]),
                **COPIES,
                "node.id": id,
                "controller.quorum.voters": voters,
            }
            return apache_kafka.prepared(jars, f"127.0.0.1:{brokers[id]}", settings, jvm_flags=JVM_FLAGS)

        with ThreadPoolExecutor() as pool:
            self.nodes = dict(zip(NODES, pool.map(prepared, NODES), strict=True))
        self.bootstrap = ",".join(node.bootstrap for node in self.nodes.values())
        self._jars = jars
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def start(self) -> None:
        """Start all nodes at once: the first is ready only when it has found a second."""
        for node in self.nodes.values():
            node.spawn()
        for node in self.nodes.values():
            node.await_ready()
        self.await_whole()

    def stop(self) -> None:
        """End all nodes and forget their data."""
        for node in self.nodes.values():
            node.stop()

    # --- who does what ------------------------------------------------------------------------------------------------

    def busiest_leader(self, topics: Collection[str]) -> int:
        """The node that leads the partition with the most records."""
        described = self._admin.list_topics(timeout=60).topics
        leaders = {
            TopicPartition(topic, number): partition.leader
            for topic in topics
            for number, partition in described[topic].partitions.items()
        }
        ends = self._admin.list_offsets(dict.fromkeys(leaders, OffsetSpec.latest()), request_timeout=60)
        return leaders[max(ends, key=lambda place: ends[place].result().offset)]

    def coordinator(self, group: str) -> int:
        """The node that a consumer group's members talk to."""
        described = self._admin.describe_consumer_groups([group], request_timeout=60)[group].result()
        return int(described.coordinator.id)

    def controller(self) -> int:
        """The node that decides who leads. Of Kafka's own tool: a broker names any node to those who ask it."""
        tool = ("java", *JVM_FLAGS, "-cp", f"{self._jars}/*", "org.apache.kafka.tools.MetadataQuorumCommand")
        asked = [*tool, "--bootstrap-server", self.bootstrap, "describe", "--status"]
        said = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=120).stdout
        (leader,) = (line.split()[1] for line in said.splitlines() if line.startswith("LeaderId:"))
        return int(leader)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def await_without(self, id: int) -> None:
        """Return once others lead what this node led, and none waits for its copy any more."""
        eventually(
            lambda: all(
                each.leader > 0 and id not in (each.leader, *each.isrs) for each in self._partitions()
            )
        )

    def await_whole(self) -> None:
        """Return once all nodes are there and each partition's copies are all up to date."""
        eventually(
            lambda: (
                len(self._brokers()) == len(NODES)
                and all(len(each.isrs) == len(each.replicas) for each in self._partitions())
            )
        )

    def _partitions(self) -> list[Any]:
        metadata = self._metadata()
        return [each for topic in metadata.topics.values() for each in topic.partitions.values()]

    def _brokers(self) -> Collection[int]:
        return self._metadata().brokers.keys()

    def _metadata(self) -> Any:
        """What one of the nodes says of topics and nodes; the one that was asked may be the one that was killed."""

        def ask() -> Any:
            with contextlib.suppress(KafkaException):
                return self._admin.list_topics(timeout=10)

        return eventually(ask)
