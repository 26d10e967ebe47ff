"""A file of jobs, opened: with at least one line, and not of a form that only looks like JSON lines."""

import codecs
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO

from headrace.cli.errors import Failure
from headrace.cli.exits import Exit

_MAGIC = {
    b"\x1f\x8b": ("compressed by gzip", "zcat"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstdcat"),
    b"\xfd7zXZ\x00": ("compressed by xz", "xzcat"),
    b"BZh": ("compressed by bzip2", "bzcat"),
    b"PK\x03\x04": ("a zip archive", "unzip -p"),
    # UTF-32 before UTF-16, whose marks begin the same.
    b"\xff\xfe\x00\x00": ("UTF-32, and must be UTF-8", "iconv -f UTF-32 -t UTF-8"),
    b"\x00\x00\xfe\xff": ("UTF-32, and must be UTF-8", "iconv -f UTF-32 -t UTF-8"),
    b"\xff\xfe": ("UTF-16, and must be UTF-8", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16, and must be UTF-8", "iconv -f UTF-16 -t UTF-8"),
    b"[": ("a JSON array, and must be one object a line", "jq -c '.[]'"),
}
# Without a mark: blanks and the first bracket, each with the NULs that the encoding puts before or behind it.
_UNMARKED = {
    "UTF-32LE": re.compile(rb"([ \t\r\n]\0\0\0)*[{[]\0\0\0"),
    "UTF-32BE": re.compile(rb"(\0\0\0[ \t\r\n])*\0\0\0[{[]"),
    "UTF-16LE": re.compile(rb"([ \t\r\n]\0)*[{[]\0"),
    "UTF-16BE": re.compile(rb"(\0[ \t\r\n])*\0[{[]"),
}
LOOKED_AT = 100  # lines, for one that may be a job
_SPREAD = ("JSON over several lines, and must be one object a line", "jq -c .")
_CR_ALONE = ("of lines that end with CR alone, and must end with LF", "tr '\\r' '\\n' <")


@contextmanager
def open_input(path: str, command: str) -> Iterator[Iterable[bytes]]:
    """The lines of ``path``, for "-" of stdin, which stays open; to be read twice where that can be (--strict does).

    command: what takes lines on stdin, for the remedy. Raises OSError, and Failure where they are plainly no JSON lines.
    """
    if path == "-":
        if sys.stdin is None:
            raise Failure(Exit.USAGE, "No job was read: stdin is closed.", "Name a file, or pipe lines in.")
        yield _looked_at(sys.stdin.buffer, "stdin", "FILE", f"| {command}")
    else:
        with open(path, "rb") as source:
            yield _looked_at(source, path, shlex.quote(path), f"| {command}")


def check_input(path: Path) -> None:
    """The same look at a file that is then read by its name, before a stack or a model is started for nothing.

    Raises OSError, and Failure also for what cannot be read again: stdin, or a pipe.
    """
    if str(path) == "-":
        raise _not_again("stdin")
    with path.open("rb") as source:
        if not source.seekable():
            raise _not_again(str(path))
        made = shlex.quote(f"{path}.lines.jsonl")  # never the file itself, which the shell would empty
        _looked_at(source, str(path), shlex.quote(str(path)), f"> {made}")


def _not_again(name: str) -> Failure:
    return Failure(
        Exit.USAGE,
        f"No job was read: {name} can be read once, and this command reads its file again.",
        "Write the lines to a file, and name that.",
    )


def _looked_at(source: IO[bytes], name: str, file: str, sink: str) -> Iterable[bytes]:
    """The lines of ``source``, from the first; the source itself where it can be read twice.

    name, file: the source, for people and for a shell. sink: where a shell has to put lines that are made of it.
    """
    start = source.tell() if source.seekable() else None
    ahead = _read_ahead(source, name)
    if form := _unmarked(b"".join(ahead)) or _other_form(ahead[-1].strip()):
        what, command = form
        raise Failure(Exit.USAGE, f"No job was read: {name} is {what}.", f"Try `{command} {file} {sink}`.")
    if not _comes_to_an_object(source, ahead):
        raise Failure(
            Exit.USAGE,
            f"No job was read: of the first lines of {name} none is a JSON object.",
            f"Where each line is a prompt, try `jq -Rc '{{prompt: .}}' {file} {sink}`.",
        )
    if start is None:
        return chain(ahead, source)
    source.seek(start)
    return source


def _read_ahead(source: IO[bytes], name: str) -> list[bytes]:
    """The lines up to the first that is not blank, in whatever encoding. Raises Failure where all are."""
    ahead: list[bytes] = []
    for line in source:
        ahead.append(line)
        if line.strip(b" \t\n\r\v\f\0"):  # NUL: the other half of a blank in UTF-16
            return ahead
    raise Failure(Exit.USAGE, f"There are no jobs in {name}: it is empty.")


def _comes_to_an_object(source: IO[bytes], ahead: list[bytes]) -> bool:
    """Whether one of the first lines begins as a job does; those that are read for that are put to ``ahead``.

    Some bad lines are no more than that. Where all are, each would be a dead letter, and too many stop workers for everybody.
    """
    while not ahead[-1].removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        line = source.readline()
        if not line or len(ahead) == LOOKED_AT:
            return False
        ahead.append(line)
    return True


def _unmarked(start: bytes) -> tuple[str, str] | None:
    """As _other_form, of a file that starts so: UTF-16 or UTF-32 without a mark of its byte order."""
    for encoding, opening in _UNMARKED.items():
        if opening.match(start):
            return f"{encoding[:-2]}, and must be UTF-8", f"iconv -f {encoding} -t UTF-8"
    return None


def _other_form(first: bytes) -> tuple[str, str] | None:
    """What a file with this first line is, and the command that makes JSON lines of it; None where it may have jobs."""
    if first == b"{":
        return _SPREAD
    if b"}\r{" in first:  # no JSON has that: a text in it writes CR as an escape
        return _CR_ALONE
    return next((form for magic, form in _MAGIC.items() if first.startswith(magic)), None)
