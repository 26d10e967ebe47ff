from collections.abc import Iterator

import pytest

from headrace.ledger import Ledger


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    """A ledger on a fresh, migrated database."""
    with Ledger(database_url) as ledger:
        yield ledger
