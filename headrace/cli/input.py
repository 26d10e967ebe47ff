"""A file of jobs, opened: with at least one line, and not of a form that only looks like JSON lines."""

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import IO

from headrace.cli.errors import Failure
from headrace.cli.exits import Exit

_MAGIC = {
    b"\x1f\x8b": ("compressed by gzip", "zcat"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstdcat"),
    b"\xfd7zXZ\x00": ("compressed by xz", "xzcat"),
    b"BZh": ("compressed by bzip2", "bzcat"),
    b"PK\x03\x04": ("a zip archive", "unzip -p"),
    b"\xff\xfe": ("UTF-16, and must be UTF-8", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16, and must be UTF-8", "iconv -f UTF-16 -t UTF-8"),
    b"{\x00": ("UTF-16, and must be UTF-8", "iconv -f UTF-16LE -t UTF-8"),
    b"\x00{": ("UTF-16, and must be UTF-8", "iconv -f UTF-16BE -t UTF-8"),
    b"[": ("a JSON array, and must be one object a line", "jq -c '.[]'"),
}
_SPREAD = ("JSON over several lines, and must be one object a line", "jq -c .")
_CR_ALONE = ("of lines that end with CR alone, and must end with LF", "tr '\\r' '\\n' <")


@contextmanager
def open_input(path: str) -> Iterator[Iterable[bytes]]:
    """The lines of ``path``, for "-" of stdin, which stays open. Raises Failure where they are plainly no JSON lines."""
    if path == "-":
        yield _looked_at(sys.stdin.buffer, "stdin")
    else:
        with open(path, "rb") as source:
            yield _looked_at(source, path)


def read_ahead(source: IO[bytes], name: str) -> list[bytes]:
    """The lines up to the first that is not blank. Raises Failure where all are."""
    ahead: list[bytes] = []
    for line in source:
        ahead.append(line)
        if line.strip():
            return ahead
    raise Failure(Exit.USAGE, f"There are no jobs in {name}: it is empty.")


def _looked_at(source: IO[bytes], name: str) -> Iterable[bytes]:
    """``source`` itself where it can be read twice, which --strict makes use of."""
    start = source.tell() if source.seekable() else None
    ahead = read_ahead(source, name)
    if form := _other_form(ahead[-1].strip()):
        file = "FILE" if name == "stdin" else shlex.quote(name)
        raise Failure(
            Exit.USAGE,
            f"Nothing was sent: {name} is {form[0]}.",
            f"Try `{form[1]} {file} | headrace submit -`.",
        )
    if start is None:
        return chain(ahead, source)
    source.seek(start)
    return source


def _other_form(first: bytes) -> tuple[str, str] | None:
    """What a file with this first line is, and the command that makes JSON lines of it; None where it may have jobs."""
    if first == b"{":
        return _SPREAD
    if b"}\r{" in first:  # no JSON has that: a text in it writes CR as an escape
        return _CR_ALONE
    return next((form for magic, form in _MAGIC.items() if first.startswith(magic)), None)
