"""What commands print: results to stdout, for people or as JSON; everything else to stderr."""

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from headrace.cli.errors import DISK_FULL, Failure
from headrace.cli.exits import Exit

if TYPE_CHECKING:
    from rich.console import Console


# A pipe has no width; rich would take 80 and break lines that a program or a log reads.
PIPE_WIDTH = 4096
SHOWN_LINES = 20


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def console() -> "Console":
    """The console on stdout. Made anew: tests and pipes replace sys.stdout."""
    return _console(stderr=False)


def messages() -> "Console":
    """The console on stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    made = Console(stderr=stderr, highlight=False, emoji=False, width=None if stream.isatty() else PIPE_WIDTH)
    made.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign]
    return made


def _raise_broken_pipe() -> NoReturn:
    """In place of rich's own way, which is to exit with 1, and to send stdout nowhere whichever stream it is."""
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def printable(text: str) -> str:
    """``text`` with control characters but tab and newline escaped: what others wrote must not command a terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def count(number: int, noun: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def numbers(lines: Sequence[int]) -> str:
    """The numbers of lines, of many the first: ``line 3, 7 and 2 more``."""
    more = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    return f"line {', '.join(map(str, lines[:SHOWN_LINES]))}{more}"


def emit(data: Any) -> None:
    """Print one JSON document, on one line."""
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_NAIVE_UTC).decode() + "\n")
    sys.stdout.flush()


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table; None is shown as a dash. Values are text, never markup, and wrap where there is no room."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(header_style="bold", box=None, pad_edge=False)
    for name in columns:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*(Text("-" if value is None else printable(str(value))) for value in row))
    console().print(grid)


def fields(pairs: Mapping[str, object]) -> None:
    """Print name and value lines, leaving out what is None."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        if value is not None:
            console().print(f"{name:<{width}}  {printable(str(value))}", markup=False)


def note(text: str) -> None:
    """Print a remark to stderr."""
    messages().print(text, markup=False)


def show_failure(failure: Failure, as_json: bool) -> None:
    """Say why a command ended, on stderr."""
    if as_json:
        import orjson

        body = {"message": failure.message, "remedy": failure.remedy, "exit_code": int(failure.exit_code)}
        print(orjson.dumps({"error": body}).decode(), file=sys.stderr)
        return
    err = messages()
    err.print("[red]error:[/red] ", end="")
    err.print(failure.message, markup=False)
    if failure.remedy:
        err.print(failure.remedy, markup=False)


@contextmanager
def open_output(path: str | None) -> Iterator[IO[bytes]]:
    """``path`` for writing; for None and "-" stdout, which stays open. On a full disk no part of a file is left."""
    if path is None or path == "-":
        yield sys.stdout.buffer
        return
    file = Path(path)
    must_be_file(file)
    try:
        with file.open("wb") as out:
            yield out
    except OSError as error:
        if error.errno in DISK_FULL and file.is_file():
            file.unlink()
        raise


def must_be_file(file: Path) -> None:
    """Raise Failure where ``file`` is a directory, or has none to be made in."""
    if file.is_dir():
        raise Failure(Exit.USAGE, f"{file} is a directory.", "Name a file.")
    if not file.parent.is_dir():
        raise Failure(Exit.NOT_FOUND, f"There is no directory {file.parent}.")


def discard(*streams: IO[str]) -> None:
    """Send what these still hold, and cannot get rid of, nowhere: else the interpreter fails at its end."""
    with suppress(OSError, ValueError):  # a stream of a test's is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in streams:
            os.dup2(nowhere, stream.fileno())
