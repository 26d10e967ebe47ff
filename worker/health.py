"""Whether a process lives and is ready, and what it measures: /live, /ready, /status and /metrics over HTTP."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from headrace.engine.request import EngineStats

STALLED_AFTER_S = 120.0  # a turn takes milliseconds; seconds where an engine is ended that does not listen


@dataclass(frozen=True, slots=True)
class Status:
    """What a worker is doing. partitions: assigned now. held: records in memory. Jobs by where they are.

    paused: why it takes no jobs for now, though it could. engine: its own snapshot; None before the first.
    """

    worker: str
    model: str
    ready: bool
    stopping: bool
    partitions: dict[str, int]
    waiting: dict[str, int]
    held: int
    in_flight: int
    finishing: int
    unconfirmed: int
    paused: str | None = None
    engine: EngineStats | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        """False once the loop that makes these has stood still for long."""
        return time.monotonic() - self.at < STALLED_AFTER_S


def loading(worker: str, model: str) -> Status:
    """Of a worker that has not begun: it lives, however long that takes, and is not ready."""
    why = "the model is not loaded yet, or Postgres is away"
    return Status(worker, model, False, False, {}, {}, 0, 0, 0, 0, paused=why)


class Health(Protocol):
    """What a process says of itself: a dataclass, shown as JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def at(self) -> float:
        """When it said so, by time.monotonic()."""

    @property
    def live(self) -> bool:
        """False when only a restart will help."""

    @property
    def ready(self) -> bool:
        """Whether it does its work now."""


class HealthServer:
    """Answers on a port of its own: 200 or 503, with the status as JSON; and Prometheus."""

    def __init__(
        self, port: int, status: Callable[[], Health], registry: CollectorRegistry | None = None
    ) -> None:
        self.tell(status, registry or CollectorRegistry())
        self._server = ThreadingHTTPServer(("", port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def tell(self, status: Callable[[], Health], registry: CollectorRegistry) -> None:
        """From now on, answer with what these say."""
        self.status, self.registry = status, registry

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(source: HealthServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(source.registry))
                return
            now = source.status()
            verdicts = {"/live": now.live, "/ready": now.live and now.ready, "/status": True}
            if self.path not in verdicts:
                self.send_error(404)
                return
            fields = asdict(now)
            age_s = round(time.monotonic() - fields.pop("at"), 3)
            body = json.dumps({**fields, "age_s": age_s, "live": now.live, "ready": now.ready}).encode()
            self._answer(200 if verdicts[self.path] else 503, "application/json", body)

        def _answer(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds; they are no news."""

    return Handler
