"""docs/cli.md, written from the commands themselves: `python -m headrace.cli.reference > docs/cli.md`."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from headrace.cli.exits import Exit
from headrace.cli.main import app

INTRO = """# The command line

Written by `make docs` from the commands themselves; a test compares.

Addresses come from `KAFKA_BOOTSTRAP_SERVERS` and `DATABASE_URL`, else from the stack that `headrace local up` has
started. Results go to stdout, remarks and errors to stderr. With `--json` a command prints one JSON document to
stdout, worker and recorder log one a line to stderr, and an error is one on stderr: `{"error": {"message", "remedy",
"exit_code"}}`. All settings are in [operations](operations.md).
"""


def write() -> str:
    """The page."""
    root = typer.main.get_command(app)
    parts = [INTRO, _exit_codes(), "## Commands\n"]
    parts += [_command(path, command) for path, command in _walk(root, "headrace")]
    return "\n".join(parts)


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from _walk(child, f"{path} {name}")
        else:
            yield f"{path} {name}", child


def _command(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)])
    lines = [f"### {path}\n", f"```\n{usage}\n```\n", f"{inspect.cleandoc(command.help)}\n"]
    rows = [(_name(p), p.help or "", _default(p)) for p in (*arguments, *options)]
    if rows:
        lines.append(_table(("", "", "default"), rows))
    return "\n".join(lines)


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = [
        ", ".join(f"`{option}`" for option in sorted(options, key=len, reverse=True))
        for options in (parameter.opts, parameter.secondary_opts)
        if options
    ]
    return " / ".join(names)


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or parameter.required:
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _exit_codes() -> str:
    rows = [(str(int(code)), code.name.lower().replace("_", " "), code.meaning) for code in Exit]
    return "## Exit codes\n\n" + _table(("code", "name", "meaning"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


if __name__ == "__main__":
    print(write(), end="")
