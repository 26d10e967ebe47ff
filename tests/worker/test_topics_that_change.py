"""A topic of jobs changes under workers and a recorder that run."""

import apache_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pipeline import Pipeline, pipeline, recording

from headrace.ledger import topic_ids


@pytest.fixture(autouse=True)
def apache(kafka_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded broker neither deletes topics nor adds partitions as Kafka does."""
    if kafka_kind == apache_kafka.TANSU:
        pytest.skip("needs Apache Kafka")
    monkeypatch.setattr(topic_ids, "LOOK_EVERY_S", 0.2)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, str]]:
    """Who has looked at which topic."""
    looked: set[tuple[int, str]] = set()
    compare = topic_ids.TopicIds._compare

    def noted(self: topic_ids.TopicIds) -> set[str]:
        changed = compare(self)
        looked.update((id(self), topic) for topic in self._known)
        return changed

    monkeypatch.setattr(topic_ids.TopicIds, "_compare", noted)
    return looked


def make_anew(line: Pipeline, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": line.bootstrap})
    admin.delete_topics([topic])[topic].result(60)
    line.wait_for(lambda: topic not in admin.list_topics(timeout=60).topics)
    apache_kafka.create_topics(line.bootstrap, [topic], 1)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("more", [5, 50])
def test_a_topic_that_is_deleted_and_made_again_is_read_from_its_beginning(
    kafka: str, database_url: str, known: set[tuple[int, str]], protocol: str, more: int
) -> None:
    with pipeline(kafka, database_url, partitions=1) as line, recording(line):
        worker = line.start_worker(group_protocol=protocol)
        for _ in range(20):
            line.submit("first")
        line.wait_terminal(20)
        line.wait_for(lambda: line.lag() == 0)
        topic = line.topics.jobs("standard")
        line.wait_for(lambda: sum(each == topic for _, each in known) == 2, what="not looked at by both")
        make_anew(line, topic)
        ids = {line.submit("second") for _ in range(more)}
        line.flush()
        line.wait_for(lambda: ids <= line.rows().keys() and line.states() == {"succeeded": 20 + more})
        line.wait_for(lambda: line.committed() == {0: more})
        worker.close()
        assert line.committed() == {0: more}


def test_partitions_that_a_topic_is_given_are_read_from_their_beginning(
    kafka: str, database_url: str
) -> None:
    with pipeline(kafka, database_url, partitions=1) as line:
        worker = line.start_worker(kafka={"topic.metadata.refresh.interval.ms": 200})
        line.submit("first")
        line.wait_terminal(1)
        topic, admin = line.topics.jobs("standard"), AdminClient({"bootstrap.servers": line.bootstrap})
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(60)
        line.wait_for(lambda: len(admin.list_topics(topic, 60).topics[topic].partitions) == 3)
        line.producer.list_topics(topic, 60)
        for partition in (1, 2):
            line.send({"prompt": "x"}, partition=partition)
        line.wait_terminal(3)
        worker.close()
        assert line.states() == {"succeeded": 3}


def test_jobs_whose_records_are_deleted_unread_stay_queued_until_they_are_sent_again_under_their_ids(
    kafka: str, database_url: str
) -> None:
    with pipeline(kafka, database_url, partitions=1) as line, recording(line):
        for n in range(3):
            line.send({"prompt": f"without an id {n}"})
        line.wait_for(lambda: line.states() == {"queued": 3})
        admin, place = AdminClient({"bootstrap.servers": kafka}), (line.topics.jobs("standard"), 0)
        (done,) = admin.delete_records([TopicPartition(*place, 2)]).values()
        done.result(60)
        worker = line.start_worker()
        line.wait_terminal(1)
        line.wait_for(lambda: line.lag() == 0)
        assert line.states() == {"queued": 2, "succeeded": 1}
        for offset, id in line.query("SELECT src_offset, id FROM jobs WHERE state = 0"):
            line.send({"prompt": f"without an id {offset}", "job_id": str(id)})
        line.wait_terminal(3)
        worker.close()
        assert line.states() == {"succeeded": 3}
