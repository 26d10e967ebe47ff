"""A stack that cannot be opened or closed as it should leaves as little behind as it can."""

import sys
from pathlib import Path
from threading import Event

import pytest

from headrace.local.child import Child
from headrace.local.stack import Service, Stack
from headrace.local.state import StateDir
from headrace.settings import Settings


def stack(tmp_path: Path) -> Stack:
    return Stack(Settings(state_dir=tmp_path), Event(), print)


def child(tmp_path: Path, name: str) -> Child:
    code = "import time; time.sleep(600)"
    return Child.start(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", grace_s=5.0)


class Unstoppable(Child):
    """Raises when it is stopped; ends all the same."""

    def stop(self) -> None:
        self.popen.kill()
        self.popen.wait()
        raise PermissionError(self.name)


def test_every_child_is_stopped_even_if_one_stop_raises(tmp_path: Path) -> None:
    opened = stack(tmp_path)
    opened.__enter__()
    worker, recorder, broker = (child(tmp_path, name) for name in ("worker", "recorder", "broker"))
    worker = Unstoppable("worker", worker.popen, worker.identity, worker.log, worker.grace_s)
    opened._parts = [broker]
    opened._services = [Service("recorder", (), recorder), Service("worker", (), worker)]
    with pytest.raises(PermissionError, match="worker"):
        opened.close()
    assert all(each.popen.poll() is not None for each in (worker, recorder, broker))
    with StateDir(tmp_path).lock():
        assert StateDir(tmp_path).read().parent is not None  # for the next run to clean up by


def test_a_clean_up_that_raises_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StateDir) -> list[str]:
        raise PermissionError("not yours")

    monkeypatch.setattr(StateDir, "clean_up", broken)
    with pytest.raises(PermissionError, match="not yours"), stack(tmp_path):
        pass
    with StateDir(tmp_path).lock():
        pass
