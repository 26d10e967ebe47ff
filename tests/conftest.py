"""Session fixtures: the real parts that the tests run against."""

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """How long an example takes says something of the machine, and nothing of the code."""
    with contextlib.suppress(ImportError):  # a GPU machine has few packages
        from hypothesis import HealthCheck, settings

        settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("any machine")


def pytest_report_header() -> str:
    """Say which broker the tests run against."""
    import apache_kafka

    return f"broker: {apache_kafka.describe()}"


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Put back what a command run in this process changes for all of it: where logs go, and how the interpreter is told to
    look for cycles and to switch threads."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    thresholds, turn = gc.get_threshold(), sys.getswitchinterval()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    sys.setswitchinterval(turn)


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """Bootstrap servers of a broker that lives as long as the test session."""
    import apache_kafka

    broker = apache_kafka.start()
    yield broker.bootstrap
    broker.stop()


@pytest.fixture
def own_kafka() -> Iterator[object]:
    """An ``apache_kafka.Broker`` that the test may kill: it keeps its data."""
    import apache_kafka

    broker = apache_kafka.start()
    if broker.process is None or broker.kind == apache_kafka.TANSU:
        broker.stop()
        pytest.skip("needs a broker that keeps its data when it is killed")
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[object]:
    """A real Postgres that lives as long as the test session."""
    import postgres

    server = postgres.server()
    yield server
    server.stop()


@pytest.fixture
def database_url(postgres_server: object) -> Iterator[str]:
    """A fresh, migrated database for one test."""
    import postgres

    with postgres.clone(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def smollm() -> Path:
    """Directory of SmolLM2-135M-Instruct, real weights."""
    import smollm

    return smollm.path()
