"""A disk of some megabytes that a test may fill: a tmpfs of its own, where mounting is allowed."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


class NoMounting(Exception):
    """Nothing may be mounted here, as in a container without privileges."""


class SmallDisk:
    """``folder`` is an empty one on it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "folder"
        self.folder.mkdir(mode=0o700)
        self._other = root / "of somebody else"

    def fill(self) -> None:
        """Take all that is left, in a file beside the folder."""
        with self._other.open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))

    def free(self) -> None:
        """Give it back."""
        self._other.unlink()


@contextlib.contextmanager
def mounted(megabytes: int) -> Iterator[SmallDisk]:
    """A disk for the length of a ``with``. Raises NoMounting, with the reason."""
    root = Path(tempfile.mkdtemp(prefix="headrace-small-disk-"))
    try:
        _mount(root, megabytes)
        try:
            root.chmod(0o755)
            yield SmallDisk(root)
        finally:
            # Lazily: a file that a dying process still has open there must not keep it.
            subprocess.run(["umount", "--lazy", str(root)], check=True)
    finally:
        root.rmdir()


def _mount(root: Path, megabytes: int) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "headrace-small-disk", str(root)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise NoMounting(str(error)) from None
    except subprocess.CalledProcessError as error:
        raise NoMounting(error.stderr.splitlines()[0]) from None
