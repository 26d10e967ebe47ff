"""What a stack leaves on disk so that the next command finds it, and the next run can clean up after a killed one.

The directory holds ``lock`` (held for as long as the stack's parent lives: the kernel lets go of it even after
SIGKILL), ``stack.json`` and ``logs/``.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace.local import database
from headrace.local.child import Identity, stop_process
from headrace.local.errors import AlreadyRunning, StateNotKept


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the stack's parts are.

    kafka: librdkafka's properties of who joins a group there, where the broker is the stack's own.
    """

    kafka_bootstrap_servers: str
    database_url: str
    kafka: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """``stack.json``. Everything in it belongs to the stack and is the stack's to remove.

    passing: the stack was started for one file and ends with it, whoever else has jobs there.
    """

    parent: Identity | None = None
    passing: bool = False
    children: list[Identity] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    addresses: Addresses | None = None


class StateDir:
    """The state directory of one stack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / "stack.json"

    @property
    def logs(self) -> Path:
        """Where each child's output goes, a file a child."""
        return self.path / "logs"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Own the directory. Raises AlreadyRunning while another living process does, StateNotKept."""
        with self._keeping():
            self.logs.mkdir(parents=True, exist_ok=True)
            handle = (self.path / "lock").open("a")
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                parent = self.read().parent
                raise AlreadyRunning(
                    f"A stack is already running in {self.path}"
                    + (f" (process {parent.pid})." if parent else "."),
                    "Stop it with Ctrl-C in its terminal, or give this one another HEADRACE_STATE_DIR.",
                ) from None
            yield

    def read(self) -> Record:
        """The record on disk; an empty one when there is none, or when it cannot be read."""
        try:
            raw = json.loads(self._file.read_text())
            parent, addresses = raw["parent"], raw["addresses"]
            return Record(
                parent=Identity(**parent) if parent else None,
                passing=raw.get("passing", False),
                children=[Identity(**child) for child in raw["children"]],
                homes=raw["homes"],
                addresses=Addresses(**addresses) if addresses else None,
            )
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return Record()

    def write(self, record: Record) -> None:
        """Replace the record, atomically. Raises StateNotKept."""
        beside = self._file.with_suffix(".new")
        with self._keeping():
            beside.write_text(json.dumps(asdict(record), indent=2))
            beside.replace(self._file)

    def clear(self) -> None:
        """Forget the record."""
        self._file.unlink(missing_ok=True)

    def clean_up(self) -> list[str]:
        """Stop what a killed run left behind and delete its data. Returns the names of what was still running."""
        record, found = self.read(), []
        for identity in reversed(record.children):  # those that depend on others were started last
            if process := identity.find():
                found.append(identity.name)
                stop_process(process, grace_s=2.0)
        for home in record.homes:
            database.remove(Path(home))
        self.clear()
        return found

    def running(self) -> Addresses | None:
        """Addresses of the stack that runs here now, if one does."""
        record = self.read()
        return record.addresses if record.parent and record.parent.find() else None

    def staying(self) -> Addresses | None:
        """The same, where the stack does not end with a file of somebody else's."""
        return None if self.read().passing else self.running()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Say of a directory that cannot be written to which one it is, and which setting names another."""
        try:
            yield
        except OSError as error:
            raise StateNotKept(
                f"The stack's state cannot be kept in {self.path}: {os.strerror(error.errno or 0)}.",
                "Set HEADRACE_STATE_DIR to a directory that can be written to and has room.",
            ) from error
