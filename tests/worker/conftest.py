from collections.abc import Iterator

import apache_kafka
import pipeline
import pytest


@pytest.fixture
def line(kafka: str, database_url: str) -> Iterator[pipeline.Pipeline]:
    """A pipeline with topics and a job table of its own."""
    with pipeline.pipeline(kafka, database_url) as made:
        yield made


@pytest.fixture(scope="session")
def kafka_kind() -> str:
    """Which broker the tests have."""
    return apache_kafka.describe()
