"""Bodies as files under a directory, a shared one where several machines read and write them."""

import errno
import os
import secrets
import stat
from pathlib import Path

from headrace.store.errors import BodyAltered, BodyMissing, NotAllowed, StoreUnavailable

_LINKS = (errno.ELOOP, errno.ENOTDIR)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A FIFO that somebody put there must not block the reader.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Directory:
    """Bodies below ``root``. Raises StoreUnavailable if it is not there and cannot be made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"{root} cannot be made: {error.strerror}") from error

    def write(self, name: str, body: bytes) -> None:
        """See Bodies. Written beside its place and then renamed: no reader ever sees a part of it."""
        path = self._root / name
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("xb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
            _sync_directory(path.parent)
        except OSError as error:
            raise StoreUnavailable(f"{self._root} takes nothing: {error.strerror}") from error

    def read(self, name: str, size: int) -> bytes:
        """See Bodies. Also raises NotAllowed for a link, wherever on the way, and for what is no file."""
        try:
            descriptor = self._open(name)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise NotAllowed(f"{name} is no file")
                if found.st_size != size:
                    raise BodyAltered(f"{name} has {found.st_size:,} bytes, and not {size:,}")
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read(size)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise BodyMissing(f"there is no {name} in {self._root}") from None
        except OSError as error:
            raise StoreUnavailable(f"{name} cannot be read: {error.strerror}") from error

    def _open(self, name: str) -> int:
        """A descriptor of the file. Opened part by part, so that no link is followed, not even one made meanwhile."""
        *parents, last = name.split("/")
        here = os.open(self._root, _DIRECTORY)
        try:
            for parent in parents:
                inner = os.open(parent, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(here)
                here = inner
            return os.open(last, _FILE, dir_fd=here)
        except OSError as error:
            # ELOOP for a link, ENOTDIR for a link (or a file) where a directory should be.
            if error.errno in _LINKS:
                raise NotAllowed(f"{name} leads over a link, or through what is no directory") from None
            raise
        finally:
            os.close(here)


def _sync_directory(path: Path) -> None:
    """Make the names in a directory survive a crash, not only the files' contents."""
    descriptor = os.open(path, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
