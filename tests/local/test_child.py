"""A child process: logged, waited for, stopped by identity, never by a pid alone."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, Timer

import psutil
import pytest

from headrace.local.child import Child, Identity, stop_process
from headrace.local.errors import ChildFailed, Interrupted

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.grace_s = 0.1
        child.stop()


def start(started: list[Child], tmp_path: Path, code: str, grace_s: float = 5.0) -> Child:
    child = Child.start("part", [sys.executable, "-c", code], tmp_path / "part.log", grace_s=grace_s)
    started.append(child)
    return child


def test_output_goes_to_the_log(started: list[Child], tmp_path: Path) -> None:
    child = start(started, tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    child.wait(Event())
    assert set(child.log.read_text().split()) == {"out", "err"}


def test_a_child_is_in_a_session_of_its_own(started: list[Child], tmp_path: Path) -> None:
    child = start(started, tmp_path, "import os; print(os.getsid(0) == os.getpid())")
    child.wait(Event())
    assert child.log.read_text().strip() == "True"


def test_a_child_that_ends_badly_says_why(started: list[Child], tmp_path: Path) -> None:
    child = start(started, tmp_path, "raise SystemExit('no port is free')")
    with pytest.raises(ChildFailed, match="ended with status 1") as failure:
        child.wait(Event())
    assert "no port is free" in failure.value.message
    assert str(child.log) in failure.value.remedy


def test_a_child_that_is_never_ready_fails(started: list[Child], tmp_path: Path) -> None:
    child = start(started, tmp_path, SLEEP)
    with pytest.raises(ChildFailed, match="not ready"):
        child.wait_until(lambda: False, Event(), timeout_s=0.1)


def test_a_stop_interrupts_the_wait(started: list[Child], tmp_path: Path) -> None:
    child, stop = start(started, tmp_path, SLEEP), Event()
    Timer(0.1, stop.set).start()
    with pytest.raises(Interrupted):
        child.wait_until(lambda: False, stop, timeout_s=120)


def test_stopping_forces_a_child_that_will_not(started: list[Child], tmp_path: Path) -> None:
    child = start(started, tmp_path, STUBBORN, grace_s=0.2)
    child.wait_until(lambda: "up" in child.log.read_text(), Event(), timeout_s=120)
    child.stop()
    assert child.popen.returncode == -9
    child.stop()  # a second time does nothing


def test_force_takes_the_childs_own_children_along(started: list[Child], tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True)\n"
    child = start(started, tmp_path, code + STUBBORN, grace_s=0.2)
    child.wait_until(lambda: child.log.read_text().count("up") == 2, Event(), timeout_s=120)
    grandchild = psutil.Process(int(child.log.read_text().split()[0]))
    child.stop()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_what_has_ended_and_nobody_reaps_is_not_waited_for(started: list[Child], tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '']).pid, flush=True)\n"
    child = start(started, tmp_path, code + SLEEP)
    child.wait_until(lambda: "up" in child.log.read_text(), Event(), timeout_s=120)
    ended = psutil.Process(int(child.log.read_text().split()[0]))
    child.wait_until(lambda: ended.status() == psutil.STATUS_ZOMBIE, Event(), timeout_s=120)
    stopping = Thread(target=stop_process, args=(ended, 600.0), daemon=True)
    stopping.start()
    stopping.join(120)
    assert not stopping.is_alive()


def test_an_identity_finds_its_process_and_no_other() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        identity = Identity.of("part", process.pid)
        assert identity.find() is not None
        assert Identity("part", process.pid, identity.created - 5).find() is None
    finally:
        process.kill()
        process.wait()
    assert identity.find() is None


def test_a_zombie_is_nobody() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = Identity.of("part", process.pid)
    deadline = time.monotonic() + 120
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert identity.find() is None
    process.wait()
