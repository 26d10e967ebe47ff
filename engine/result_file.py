"""The output of ``headrace generate``: JSON Lines that survive a kill and can be taken up again."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_START = b'{"line": '


class LineSet:
    """A set of line numbers: one bit each, so that ten million lines cost little more than a megabyte."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        byte, bit = divmod(line, 8)
        return byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def add(self, line: int) -> None:
        """Add a line number from 0 up."""
        if line in self:
            return
        byte, bit = divmod(line, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << bit
        self._count += 1


class LineDigest:
    """Short digest of an input line, fed in pieces; how the line ends does not matter."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def update(self, piece: bytes) -> "LineDigest":
        """Add the next bytes of the line."""
        self._hash.update(piece.rstrip(b"\r\n"))
        return self

    def hex(self) -> str:
        """The digest as it stands in a result."""
        return self._hash.hexdigest()


class Inputs:
    """Which lines results say they answer: a bit a line and one sum over all, whatever the file's size."""

    def __init__(self) -> None:
        self._lines = LineSet()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, line: int) -> bool:
        return line in self._lines

    def add(self, line: int, digest: str) -> None:
        """Note that the input's line of this number has this digest."""
        if line not in self._lines:
            self._lines.add(line)
            word = hashlib.blake2b(f"{line} {digest}".encode(), digest_size=16).digest()
            self._sum = (self._sum + int.from_bytes(word)) % (1 << 128)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inputs) and (len(self), self._sum) == (len(other), other._sum)

    __hash__ = None  # type: ignore[assignment]


class ResultFile:
    """Appends results, each a JSON object on a line of its own that begins with the input's line number and digest.

    Every ``write`` reaches the operating system before it returns, so a kill loses nothing written and tears at most
    the last line; opening with ``resume`` cuts a torn line off and collects in ``done`` which lines have a result, and in
    ``inputs`` what they were (older files do not tell).

    Raises FileExistsError rather than touch a file with other contents, or with results when ``resume`` is false, and
    BlockingIOError when another process is writing it.
    """

    def __init__(self, path: Path, *, resume: bool, max_line: int) -> None:
        """max_line: no line number can be larger (the input's size in bytes will do)."""
        self.path = path
        self.done = LineSet()
        self.inputs = Inputs()
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        try:
            self._lock()
            if os.path.getsize(path):
                if not resume:
                    raise FileExistsError(f"{path} is not empty: resume it, or choose another name")
                self._take_up(max_line)
        except BaseException:
            self._file.close()
            raise

    def write(self, results: Iterable[tuple[int, str, Mapping[str, Any]]]) -> None:
        """Append results, each with its line's number and digest, and hand them to the operating system."""
        self._file.write(b"".join(_encode(line, digest, result) for line, digest, result in results))
        self._file.flush()

    def close(self) -> None:
        """Close the file; lets another process have it."""
        self._file.close()

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{self.path} is being written by another process") from None

    def _take_up(self, max_line: int) -> None:
        self._file.seek(0)
        whole = 0  # bytes of whole lines
        for number, record in enumerate(self._file, 1):
            if not record.endswith(b"\n") and (record.startswith(_START) or _START.startswith(record)):
                break
            line, digest = _line(record)
            if line is None or line > max_line:
                raise FileExistsError(
                    f"{self.path} is not a result file of this input: see its line {number}"
                )
            self.done.add(line)
            if digest is not None:
                self.inputs.add(line, digest)
            whole += len(record)
        self._file.truncate(whole)


def _encode(line: int, digest: str, result: Mapping[str, Any]) -> bytes:
    record = {"line": line, "input": digest, **result}
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, say in an id: written as an escape
        return json.dumps(record).encode() + b"\n"


def _line(record: bytes) -> tuple[int | None, str | None]:
    """Number and digest of the line that a result is for; None for what it does not say."""
    try:
        fields = json.loads(record)
        line, digest = fields["line"], fields.get("input")
    except (ValueError, TypeError, KeyError):
        return None, None
    known = type(line) is int and line >= 1
    return line if known else None, digest if isinstance(digest, str) else None
