"""What a stack leaves on disk: found by other commands, cleaned up after a killed run."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.local.child import Identity
from headrace.local.errors import AlreadyRunning, StateNotKept
from headrace.local.state import Addresses, Record, StateDir

ADDRESSES = Addresses("127.0.0.1:9092", "postgresql://headrace@/headrace?host=/tmp/x")


def me() -> Identity:
    return Identity.of("headrace", os.getpid())


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    record = Record(me(), True, [Identity("broker", 12, 3.5)], [str(tmp_path / "home")], ADDRESSES)
    state.write(record)
    assert state.read() == record


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parent": 3}'])
def test_a_record_that_cannot_be_read_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    assert StateDir(tmp_path).read() == Record()


def test_a_directory_has_one_stack_at_a_time(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path), StateDir(tmp_path)
    with first.lock():
        first.write(Record(me()))
        with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"), second.lock():
            pass
    with second.lock():
        assert second.logs.is_dir()


def test_a_directory_that_cannot_be_made_is_named_with_the_setting_for_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = StateDir(tmp_path / "file" / "state")
    assert state.running() is None
    with pytest.raises(StateNotKept, match=r"file/state: Not a directory\.") as refused, state.lock():
        pass
    assert "HEADRACE_STATE_DIR" in refused.value.remedy


def test_a_full_disk_is_said_of_the_state_and_not_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = StateDir(tmp_path)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StateNotKept, match="No space left on device"):
        state.write(Record(me()))


def test_a_running_stack_is_found_by_its_addresses(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert state.running() is None
    state.write(Record(me()))
    assert state.running() is None  # it is still starting
    state.write(Record(me(), addresses=ADDRESSES))
    assert state.running() == ADDRESSES


def test_a_stack_that_ends_with_a_file_is_not_for_other_files(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.write(Record(me(), passing=True, addresses=ADDRESSES))
    assert state.running() == ADDRESSES  # `headrace status` looks into it
    assert state.staying() is None
    state.write(Record(me(), addresses=ADDRESSES))
    assert state.staying() == ADDRESSES


def test_a_stack_whose_parent_is_gone_is_not_running(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.write(Record(Identity("headrace", os.getpid(), me().created - 100), addresses=ADDRESSES))
    assert state.running() is None


def test_leftovers_are_stopped_and_their_data_deleted(tmp_path: Path) -> None:
    state, home = StateDir(tmp_path), tmp_path / "home"
    home.mkdir()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        reused = Identity("database", other.pid, 1.0)  # a pid that somebody else has by now
        state.write(Record(children=[Identity.of("broker", process.pid), reused], homes=[str(home)]))
        assert state.clean_up() == ["broker"]
        process.wait(timeout=120)
        assert other.poll() is None
        assert not home.exists()
        assert state.clean_up() == []
    finally:
        for child in (process, other):
            child.kill()
            child.wait()
