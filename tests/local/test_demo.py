"""What `make demo` runs, on a terminal as its user has one: broken off by Ctrl-C, and then to its end."""

import fcntl
import json
import os
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli.exits import Exit
from headrace.local.state import Record, StateDir

CTRL_C = b"\x03"
PROMPTS = [
    {
        "custom_id": "complete-01",
        "prompt": "The capital of France is",
        "sampling": {"max_tokens": 4, "temperature": 0},
    },
    {"custom_id": "bad-01", "prompt": "The capital of Spain is", "sampling": {"max_tokens": "four"}},
]


class Demo:
    """A demo with a terminal of its own. ``screen`` is all that it has written there so far, without the colours."""

    def __init__(self, file: Path, state: Path, model: Path) -> None:
        self._terminal, its_end = os.openpty()
        termios.tcsetwinsize(its_end, (40, 200))
        foreign = ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL", "NO_COLOR")
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        ours = {"HEADRACE_STATE_DIR": str(state), "HEADRACE_MODEL": str(model), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", "local", "demo", str(file)],
            stdin=its_end, stdout=its_end, stderr=its_end, env=kept | ours, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # keys pressed there are its signals
        )  # fmt: skip
        os.close(its_end)
        self._written, self._ended, self._changed = b"", False, threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def screen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self._written.decode(errors="replace"))

    def wait_for(self, text: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: text in self.screen or self._ended, timeout=300)
        assert text in self.screen

    def press(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(timeout=300)
        self._reader.join(timeout=30)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.press(CTRL_C)
        self.end()
        os.close(self._terminal)

    def _read(self) -> None:
        while not self._ended:
            piece = self._piece()
            with self._changed:
                self._written += piece
                self._ended = not piece
                self._changed.notify_all()

    def _piece(self) -> bytes:
        try:
            return os.read(self._terminal, 65536)
        except OSError:  # nobody has the other end any more
            return b""


@contextmanager
def demo(file: Path, state: Path, model: Path) -> Iterator[Demo]:
    running = Demo(file, state, model)
    try:
        yield running
    finally:
        running.close()


def nothing_is_left(started: Record, state: StateDir) -> bool:
    """Of processes, of data and of the record by which the next run would clean up."""
    alive = [child.name for child in started.children if child.find()]
    return not alive and not any(Path(home).exists() for home in started.homes) and state.read() == Record()


@pytest.mark.timeout(900)
def test_a_demo_ends_well_after_one_that_was_broken_off(tmp_path: Path, smollm: Path) -> None:
    file, state = tmp_path / "prompts.jsonl", StateDir(tmp_path / "state")
    file.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))

    with demo(file, state.path, smollm) as first:
        first.wait_for("worker is loading the model")
        started = state.read()
        assert {"broker", "database", "recorder", "worker"} <= {child.name for child in started.children}
        first.press(CTRL_C)
        assert first.end() == Exit.INTERRUPTED, first.screen
    assert nothing_is_left(started, state)

    with demo(file, state.path, smollm) as second:
        second.wait_for("2 prompts of")
        started = state.read()
        assert second.end() == 0, second.screen
    assert nothing_is_left(started, state)
    for shown in (
        "line 2: sampling.max_tokens must be",
        # The bar, which stays in place.
        "2/2",
        "1 done · 1 failed · 0 running · 0 queued · ",
        "tokens/s · ETA",
        # A prompt of each kind with its answer, and what Postgres says of the batch and of its jobs.
        "complete-01: The capital of France is",
        "Paris",
        "bad-01: The capital of Spain is",
        "failed: sampling.max_tokens must be",
        "FROM batch_progress WHERE batch_id = 'demo';",
        "FROM job_status WHERE batch_id = 'demo'",
        "Stopping everything.",
    ):
        assert shown in second.screen, second.screen
    assert re.search(r"^complete +2 +1 +1 +0 +4", second.screen, re.MULTILINE), second.screen
    assert re.search(r"^complete-01 +succeeded +0 +4 +-", second.screen, re.MULTILINE), second.screen
