"""A root under which bodies lie, and the checks that hold wherever that is."""

import re
from hashlib import sha256
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from headrace.store.errors import BodyAltered, NotAllowed, UnknownStore

_CHECK = ".headrace-check"
BUCKETS = ("s3", "gs", "az")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):/")


class Bodies(Protocol):
    """Where a store's bodies are. Names are relative paths whose parts are checked: no ``..``, none of them empty."""

    def write(self, name: str, body: bytes) -> None:
        """Keep the body under this name, whole or not at all, in the place of what was there.

        On return it survives a crash. Raises StoreUnavailable.
        """

    def read(self, name: str, size: int) -> bytes:
        """The body of this name. Raises BodyMissing, BodyAltered if it has not ``size`` bytes, StoreUnavailable."""


class Store:
    """Bodies under one root URI. Safe to share between threads."""

    def __init__(self, root: str, bodies: Bodies) -> None:
        self.root = root.rstrip("/")
        self._bodies = bodies

    def uri(self, name: str) -> str:
        """Where the body of this name is; ``name`` needs no escaping in a URI."""
        return f"{self.root}/{name}"

    def write(self, name: str, body: bytes) -> None:
        """Keep a body. Writing the same again does no harm. Raises StoreUnavailable."""
        self._bodies.write(name, body)

    def check(self) -> None:
        """Write something and read it back. Raises StoreError."""
        body = b"headrace"
        self.write(_CHECK, body)
        self.read(self.uri(_CHECK), len(body), sha256(body).hexdigest())

    def covers(self, uri: str) -> bool:
        """Whether the URI begins as those of this store do."""
        return uri.startswith(f"{self.root}/")

    def read(self, uri: str, size: int, digest: str) -> bytes:
        """The body at ``uri``: ``size`` bytes with this SHA-256 in hexadecimal.

        Raises NotAllowed, BodyMissing, BodyAltered, StoreUnavailable.
        """
        body = self._bodies.read(self._name(uri), size)
        if sha256(body).hexdigest() != digest.lower():
            raise BodyAltered(f"{uri} has another SHA-256 than its reference says")
        return body

    def _name(self, uri: str) -> str:
        if not self.covers(uri):
            raise NotAllowed(f"{uri} is not under {self.root}")
        name = uri[len(self.root) + 1 :]
        name = unquote(name) if self.root.startswith("file:") else name
        if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in name.split("/")):
            raise NotAllowed(f"{uri} is no plain path under {self.root}")
        return name


def open_store(root: str) -> Store:
    """The store at a directory, which is made if need be, or at ``s3://bucket/prefix`` (``gs``, ``az``).

    A bucket's credentials, region and endpoint come from the environment, under the names that its own tools use. Raises
    UnknownStore, StoreNotInstalled, StoreUnavailable.
    """
    scheme = _SCHEME.match(root)
    if scheme is None or scheme[1] == "file":
        from headrace.store.directory import Directory

        path = Path(unquote(root.removeprefix("file://")) if scheme else root).expanduser().absolute()
        return Store(path.as_uri(), Directory(path))
    if scheme[1] in BUCKETS:
        from headrace.store.bucket import Bucket

        return Store(root, Bucket(root.rstrip("/")))
    raise UnknownStore(
        f"{root} is neither a directory nor a bucket ({', '.join(f'{s}://' for s in BUCKETS)})"
    )
