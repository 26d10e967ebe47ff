from collections.abc import Iterator

import apache_kafka
import pipeline
import pytest

from headrace.worker.consumer import Delivery
from headrace.worker.job import Job, read
from headrace.worker.offsets import Assignment


@pytest.fixture
def line(kafka: str, database_url: str) -> Iterator[pipeline.Pipeline]:
    """A pipeline with topics and a job table of its own."""
    with pipeline.pipeline(kafka, database_url) as made:
        yield made


@pytest.fixture
def job() -> Job:
    """A job as its worker reads it, of a record that no topic holds."""
    record = Delivery("bulk", Assignment("t", 0), 7, 1_800_000_000_000, None, b'{"prompt": "x"}', [])
    made = read(record, "pool", frozenset())
    assert isinstance(made, Job)
    return made


@pytest.fixture(scope="session")
def kafka_kind() -> str:
    """Which broker the tests have."""
    return apache_kafka.describe()
