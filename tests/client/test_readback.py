"""Reading records back from their places, on either broker."""

from collections.abc import Iterator
from uuid import uuid4

import apache_kafka
import pytest
from confluent_kafka import Producer

from headrace.client import readback
from headrace.client.readback import read_back

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["the tests' broker", "the embedded broker"])
def bootstrap(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "the tests' broker":
        yield request.getfixturevalue("kafka")
        return
    broker = apache_kafka.start_embedded()
    try:
        yield broker.bootstrap
    finally:
        broker.stop()


def test_records_are_read_back_and_places_beyond_the_end_are_left_out(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback, "_JUMP", 3)
    topic, empty = f"test-{uuid4().hex[:8]}", f"test-{uuid4().hex[:8]}"
    apache_kafka.create_topics(bootstrap, [topic, empty], partitions=1)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 200})
    for number in range(20):
        producer.produce(topic, str(number).encode())
    producer.flush()  # in one batch: the embedded broker then says that the partition ends behind its first record

    def read(*places: tuple[str, int, int]) -> list[bytes | None]:
        return [message.value() for message in read_back({"bootstrap.servers": bootstrap}, places)]

    assert read((topic, 0, 0), (topic, 0, 9), (topic, 0, 19)) == [b"0", b"9", b"19"]
    assert read((topic, 0, 20)) == []
    assert read((topic, 0, 2), (topic, 0, 21), (topic, 0, 5000)) == [b"2"]
    assert read((empty, 0, 0)) == []
    assert read((empty, 0, 7)) == []
    assert read((topic, 1, 0)) == []


@pytest.mark.parametrize("place", [("t", 2**31, 0), ("t", 99_999_999_999, 0), ("t", 0, 2**63)])
def test_a_place_beyond_kafka_s_numbers_is_left_out_without_asking(place: readback.Place) -> None:
    assert list(read_back({"bootstrap.servers": "127.0.0.1:1"}, [place])) == []
