"""The stack: what starts in which order, what each part needs of the others, and how all of it ends.

``KAFKA_BOOTSTRAP_SERVERS`` and ``DATABASE_URL`` win over the embedded parts: what they name is used, not started, and
so never stopped. Signal handlers set ``stop``; every wait here watches it, so a Ctrl-C at any moment ends in ``close``.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import TracebackType

from headrace.local import broker, database
from headrace.local.child import Child, Identity
from headrace.local.errors import ChildFailed
from headrace.local.state import Addresses, Record, StateDir
from headrace.settings import Settings, child_environment, kafka_variable

# A service that lives for less than this was not well to begin with; so many such lives in a row and we give up.
SHORT_LIFE_S = 30.0
SHORT_LIVES = 3
# The first start of all downloads the model.
WORKER_START_S = 900.0
# What a child without work of its own may take to stop.
QUICK_S = 3.0

Report = Callable[[str], None]


@dataclass(slots=True)
class Service:
    """A headrace command that is started again when it dies."""

    name: str
    arguments: tuple[str, ...]
    child: Child
    started: float = field(default_factory=time.monotonic)
    short_lives: int = 0


class Stack:
    """Broker, database, recorder and worker. ``with Stack(...) as stack: stack.start()``.

    passing: it is there for one file, and ends with it.
    """

    def __init__(self, settings: Settings, stop: Event, report: Report, *, passing: bool = False) -> None:
        self.state = StateDir(settings.state_dir.absolute())
        self._settings = settings
        self._stop = stop
        self._report = report
        self._passing = passing
        self._exit = ExitStack()
        self._record = Record()
        self._parts: list[Child] = []
        self._services: list[Service] = []
        self._environment: dict[str, str] = {}

    def __enter__(self) -> "Stack":
        with ExitStack() as entering:
            entering.enter_context(self.state.lock())
            for name in self.state.clean_up():
                self._report(f"stopped the {name} that an earlier run had left behind")
            for log in self.state.logs.glob("*.log"):
                log.unlink()
            self._record = Record(Identity.of("headrace", os.getpid()), self._passing)
            self.state.write(self._record)
            self._exit = entering.pop_all()  # nothing has raised: the lock stays ours
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Addresses:
        """Start everything, in order; returns once the worker is ready. Raises ChildFailed or Interrupted."""
        bootstrap = self._settings.kafka_bootstrap_servers or self._start_broker()
        url = self._settings.database_url or self._start_database()
        self._environment = child_environment(
            KAFKA_BOOTSTRAP_SERVERS=bootstrap, DATABASE_URL=url, **self._for_embedded_parts()
        )
        self._run("migration", "migrate")
        self._report("database is migrated")
        self._run("creation of topics", "topics", "create")
        self._report("topics are there")
        others = _workers_alive(url)
        self._serve("recorder", "recorder")
        self._serve("worker", "worker")
        self._wait_for_worker(url, others)
        self._record.addresses = Addresses(bootstrap, url, self._group_member())
        self.state.write(self._record)
        return self._record.addresses

    def supervise(self) -> None:
        """Look after the parts: start a dead service again. Raises ChildFailed when that does not help."""
        for part in self._parts:
            part.check()
        for service in self._services:
            try:
                service.child.check()
            except ChildFailed as failure:
                self._revive(service, failure)

    def close(self) -> None:
        """Stop what was started, dependants first, and delete its data; the logs stay. Idempotent.

        Whatever one step raises, the others are taken; the record then stays for the next run to clean up by.
        """
        with self._exit:
            with ExitStack() as last_first:
                for home in self._record.homes:
                    last_first.callback(database.remove, Path(home))
                for part in self._parts:
                    last_first.callback(part.stop)
                for service in self._services:  # the worker finishes and commits before the broker goes
                    last_first.callback(service.child.stop)
            self._services, self._parts, self._record = [], [], Record()
            self.state.clear()

    def _for_embedded_parts(self) -> dict[str, str]:
        """Settings of the services that suit parts which live no longer than the stack."""
        kafka = {kafka_variable(name): value for name, value in self._group_member().items()}
        return {"HEADRACE_GRACE_SECONDS": str(self._grace_s()), **kafka}

    def _group_member(self) -> dict[str, str]:
        """Kafka's properties of who joins a group at this stack's broker."""
        return {} if self._settings.kafka_bootstrap_servers else broker.GROUP_MEMBER

    def _grace_s(self) -> float:
        """How long running jobs may finish: not at all where nobody could read their answers afterwards."""
        gone = not self._settings.kafka_bootstrap_servers and not self._settings.database_url
        return (
            0.0
            if gone and "grace_seconds" not in self._settings.model_fields_set
            else self._settings.grace_seconds
        )

    # What starts, in order.

    def _start_broker(self) -> str:
        began = time.monotonic()
        port = broker.free_port()
        child = self._own(broker.start(self._log("broker"), port))
        self._parts.append(child)
        broker.wait_ready(child, port, self._stop)
        address = f"127.0.0.1:{port}"
        self._report(f"broker listens on {address} ({time.monotonic() - began:.1f} s)")
        return address

    def _start_database(self) -> str:
        began = time.monotonic()
        home = database.make_home()
        self._record.homes.append(str(home))
        self.state.write(self._record)
        child = self._own(database.start(home, self._log("database"), self._stop))
        self._parts.append(child)
        database.wait_ready(child, home, self._stop)
        self._report(f"database is up ({time.monotonic() - began:.1f} s)")
        return database.url(home)

    def _wait_for_worker(self, url: str, before: set[str]) -> None:
        began = time.monotonic()
        fetched = "" if self._settings.model else " (fetched and converted the first time)"
        self._report(f"worker is loading the model{fetched}")
        worker = self._services[-1].child
        worker.wait_until(lambda: bool(_workers_alive(url) - before), self._stop, timeout_s=WORKER_START_S)
        worker.grace_s = self._grace_s() + 5  # from here on it may have jobs to finish
        self._report(f"worker is ready ({time.monotonic() - began:.1f} s)")

    # How a headrace command becomes a child.

    def _launch(self, name: str, arguments: tuple[str, ...]) -> Child:
        # -P: the current directory must not decide what is imported.
        command = [sys.executable, "-P", "-m", "headrace", *arguments]
        environment = self._environment
        if name != "worker":  # the recorder serves health too, and one machine has a port once
            environment = {**environment, "HEADRACE_HEALTH_PORT": ""}
        return self._own(Child.start(name, command, self._log(name), env=environment, grace_s=QUICK_S))

    def _run(self, name: str, *arguments: str) -> None:
        child = self._launch(name, arguments)
        try:
            child.wait(self._stop)
        finally:
            child.stop()

    def _serve(self, name: str, *arguments: str) -> None:
        self._services.append(Service(name, arguments, self._launch(name, arguments)))

    def _revive(self, service: Service, failure: ChildFailed) -> None:
        short = time.monotonic() - service.started < SHORT_LIFE_S
        service.short_lives = service.short_lives + 1 if short else 0
        if service.short_lives >= SHORT_LIVES:
            raise failure
        self._report(f"{service.name} ended with status {service.child.popen.returncode}; starting another")
        grace = service.child.grace_s
        service.child = self._launch(service.name, service.arguments)
        service.child.grace_s = grace
        service.started = time.monotonic()

    def _own(self, child: Child) -> Child:
        self._record.children.append(child.identity)
        self.state.write(self._record)
        return child

    def _log(self, name: str) -> Path:
        return self.state.logs / f"{name.replace(' ', '-')}.log"


def _workers_alive(url: str) -> set[str]:
    """Names of the workers whose heartbeat the database knows."""
    import psycopg

    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT worker FROM workers WHERE alive_until > now()").fetchall()
    return {row[0] for row in rows}
