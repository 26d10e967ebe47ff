"""What the stress tests share: a fleet on the session's broker and database, and parts that a test may break."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import apache_kafka
import postgres
import pytest

pytest.register_assert_rewrite("fleet")

from fleet import Fleet, MakeFleet, fleet  # noqa: E402


@pytest.fixture
def make_fleet(kafka: str, database_url: str) -> Iterator[MakeFleet]:
    """Makes a fleet; see Fleet for what it may be given."""
    with ExitStack() as stack:

        def make(**given: Any) -> Fleet:
            return stack.enter_context(fleet(kafka, database_url, **given))

        yield make


@pytest.fixture
def protocol(request: pytest.FixtureRequest) -> str:
    """A group protocol, as a parameter of the test."""
    if request.param == "consumer" and apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("the embedded broker does not know KIP-848")
    return str(request.param)


@pytest.fixture
def own_postgres() -> Iterator[postgres.Server]:
    """A server that the test may stop, with few connections to give."""
    server = postgres.server(max_connections="60")
    if not server.command:
        pytest.skip("the server named by HEADRACE_TEST_DATABASE_URL is not ours to stop")
    yield server
    server.stop()
