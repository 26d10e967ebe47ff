"""A record counts as published when the broker has confirmed it, and not before."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import apache_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException
from pipeline import Pipeline, pipeline

from headrace.worker import publisher as module
from headrace.worker.publisher import Form, Publication, Publisher


@pytest.fixture
def publisher(line: Pipeline) -> Iterator[Publisher]:
    made = Publisher({"bootstrap.servers": line.bootstrap, "log_level": 0})
    yield made
    made.close()


def finished(publisher: Publisher, count: int) -> list[Publication]:
    done: list[Publication] = []
    deadline = time.monotonic() + 120
    while len(done) < count and time.monotonic() < deadline:
        done += publisher.confirmed()
        time.sleep(0.005)
    return done


def confirmed(publisher: Publisher, count: int) -> list[object]:
    return [publication.about for publication in finished(publisher, count)]


def test_each_record_is_confirmed_once(line: Pipeline, publisher: Publisher) -> None:
    for n in range(100):
        publisher.put(Publication(line.topics.results, b"k%d" % n, b"v", [("h", b"1")], n))
    assert publisher.unconfirmed == 100
    assert sorted(confirmed(publisher, 100)) == list(range(100))  # type: ignore[type-var]
    assert publisher.unconfirmed == 0
    assert {message.key() for message in line.take(line.topics.results, 100)} == {
        b"k%d" % n for n in range(100)
    }


def test_a_record_that_the_broker_will_never_take_holds_up_nothing(
    line: Pipeline, publisher: Publisher
) -> None:
    publisher.put(Publication(line.topics.results, b"big", b"x" * 2_000_000, [], "big"))
    publisher.put(Publication(line.topics.results, b"small", b"x", [], "small"))
    assert sorted(confirmed(publisher, 2)) == ["big", "small"]  # type: ignore[type-var]
    assert [message.key() for message in line.everything(line.topics.results)] == [b"small"]
    assert publisher.unconfirmed == publisher.unconfirmed_bytes == 0


def test_what_is_too_large_is_published_smaller_and_smaller_until_it_fits(
    line: Pipeline, publisher: Publisher
) -> None:
    sizes = {Form.WHOLE: 3_000_000, Form.WITHOUT_TRACE: 2_000_000, Form.WITHOUT_ANSWER: 10}
    forms = iter(list(sizes)[1:])

    def smaller(publication: Publication) -> Publication:
        form = next(forms)
        return replace(publication, value=b"x" * sizes[form], form=form)

    publisher.put(
        Publication(line.topics.results, b"k", b"x" * sizes[Form.WHOLE], [], "big", smaller=smaller)
    )
    assert publisher.unconfirmed_bytes == sizes[Form.WHOLE]
    (publication,) = finished(publisher, 1)
    assert (publication.about, publication.form) == ("big", Form.WITHOUT_ANSWER)
    assert [message.value() for message in line.everything(line.topics.results)] == [b"x" * 10]
    assert publisher.unconfirmed == publisher.unconfirmed_bytes == 0


def test_what_has_no_smaller_form_is_told_and_comes_back_as_not_published(
    line: Pipeline, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.put(Publication(line.topics.results, b"k", b"x" * 2_000_000, [], "big"))
    (publication,) = finished(publisher, 1)
    assert publication.form is Form.NOT_AT_ALL
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "does not take record b'k'" in told.getMessage()


def test_a_record_is_not_refused_for_its_neighbours_in_a_batch(kafka: str, database_url: str) -> None:
    if apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("the embedded broker takes records of any size")
    random = Random(1)
    values = {b"%d" % n: random.randbytes(1000) for n in range(200)}
    with pipeline(kafka, database_url, partitions=1, largest=5000) as line:
        publisher = Publisher({"bootstrap.servers": kafka, "log_level": 0})
        publisher.put(Publication(line.topics.results, b"big", random.randbytes(6000), [], "big"))
        for key, value in values.items():
            publisher.put(Publication(line.topics.results, key, value, [], key))
        forms = {publication.about: publication.form for publication in finished(publisher, 201)}
        publisher.close()
        there = {message.key(): message.value() for message in line.everything(line.topics.results)}
    assert there == values
    assert forms == dict.fromkeys(values, Form.WHOLE) | {"big": Form.NOT_AT_ALL}


def test_a_producer_that_broke_is_replaced_and_sends_what_was_open(
    line: Pipeline, publisher: Publisher
) -> None:
    publisher.put(Publication(line.topics.results, b"k", b"v", [], "first"))
    publisher._broken = True
    publisher.put(Publication(line.topics.results, b"k", b"v", [], "second"))
    assert sorted(confirmed(publisher, 2)) == ["first", "second"]  # type: ignore[type-var]


def test_many_records_that_fail_together_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    timed_out = KafkaError(KafkaError._MSG_TIMED_OUT)
    for n in range(50):
        publisher._refused(Publication("results", b"k", b"v", [], n), timed_out)
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 1
    assert publisher.unconfirmed == 50
    publisher.close()


class StubProducer:
    """Refuses in ``produce`` itself what ``refuse`` names, and confirms everything else."""

    refuse: dict[str, int]  # error codes by topic

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sent: list[Any] = []

    def produce(self, topic: str, *, key: bytes, on_delivery: Any, **_: Any) -> None:
        if topic in self.refuse:
            raise KafkaException(KafkaError(self.refuse[topic]))
        self.sent.append(on_delivery)

    def poll(self, _: float) -> int:
        while self.sent:
            self.sent.pop()(None, None)
        return 0

    def purge(self) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A publisher whose producer never takes records of the topic ``missing``."""
    monkeypatch.setattr(StubProducer, "refuse", {"missing": KafkaError._UNKNOWN_TOPIC}, raising=False)
    monkeypatch.setattr(module, "Producer", StubProducer)
    monkeypatch.setattr(module, "AGAIN_AFTER_S", 0.0)
    return Publisher({"bootstrap.servers": "127.0.0.1:1"})


def test_a_topic_that_is_missing_holds_up_neither_the_caller_nor_other_topics(stub: Publisher) -> None:
    stub.put(Publication("missing", b"k", b"v", [], "late"))
    stub.put(Publication("results", b"k", b"v", [], "there"))
    assert [publication.about for publication in stub.confirmed()] == ["there"]
    assert stub.unconfirmed == 1
    StubProducer.refuse = {}
    assert [publication.about for publication in stub.confirmed()] == ["late"]


def test_a_producer_that_refuses_everything_because_it_was_fenced_is_replaced(stub: Publisher) -> None:
    StubProducer.refuse = {"results": KafkaError._FATAL}
    stub.put(Publication("results", b"k", b"v", [], "first"))
    assert stub.confirmed() == []
    fenced, StubProducer.refuse = stub._producer, {}
    assert [publication.about for publication in stub.confirmed()] == ["first"]
    assert stub._producer is not fenced
