"""A broker that is away is told once, with what to do about it."""

import logging
import threading
import time

import postgres
import pytest
from confluent_kafka import Consumer, KafkaError, Producer

from headrace.ledger import Ledger
from headrace.ledger.errors import NotMigrated
from headrace.ledger.kafka_log import KafkaLog, callbacks
from headrace.ledger.recorder import Recorder
from headrace.schemas import Topics

NOBODY = "127.0.0.1:1"


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_all_clients_together_say_once_that_no_broker_is_there(caplog: pytest.LogCaptureFixture) -> None:
    callbacks.cache_clear()  # another test may have said it of this address within the minute
    consumer = Consumer({"bootstrap.servers": NOBODY, "group.id": "g"}, **callbacks(NOBODY))
    producer = Producer({"bootstrap.servers": NOBODY}, **callbacks(NOBODY))
    consumer.subscribe(["t"])
    until = time.monotonic() + 120
    while not errors(caplog) and time.monotonic() < until:
        consumer.poll(0.05)
        producer.poll(0.05)
    for _ in range(5):  # they go on trying
        consumer.poll(0.05)
        producer.poll(0.05)
    consumer.close()
    (line,) = errors(caplog)
    assert NOBODY in line
    assert "refused" in line
    assert "KAFKA_BOOTSTRAP_SERVERS" in line


def test_a_refused_login_is_told_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    kafka_log = KafkaLog("kafka:9092")
    kafka_log.note(KafkaError(KafkaError._TRANSPORT, "connection reset"))
    kafka_log.note(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    kafka_log.note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    (line,) = errors(caplog)
    assert "wrong password" in line


def test_lines_about_other_things_keep_their_level(caplog: pytest.LogCaptureFixture) -> None:
    KafkaLog("kafka:9092").log(logging.WARNING, "%s [%s] %s", "CONFWARN", "rdkafka#1", "odd")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "CONFWARN [rdkafka#1] odd")
    ]


def test_a_recorder_on_a_database_without_tables_ends_and_says_what_to_do(
    postgres_server: postgres.Server,
) -> None:
    with (
        postgres.empty(postgres_server) as url,
        Ledger(url) as ledger,
        pytest.raises(NotMigrated, match="job table is not as"),
    ):
        Recorder(NOBODY, Topics(), ledger).run(threading.Event())
