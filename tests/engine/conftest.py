"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest
import tiny_model
from fake_graphs import FakeGraph, fake_graphs


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny model; its weights are random."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGraph]]:
    """Engines record fake graphs; the graphs replayed so far, in order."""
    with fake_graphs(monkeypatch) as replayed:
        yield replayed
