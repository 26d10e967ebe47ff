"""docs/cli.md is what the commands say of themselves."""

from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.exits import Exit
from headrace.cli.reference import write

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == write(), "run `make docs`"


def test_every_command_has_a_section() -> None:
    sections = {
        line.removeprefix("### headrace ") for line in write().splitlines() if line.startswith("### ")
    }
    expected = [
        "submit",
        "status",
        "results",
        "cancel",
        "retry",
        "worker",
        "recorder",
        "migrate",
        "generate",
        "convert",
        "doctor",
    ]
    assert sections >= {
        *expected,
        "topics create",
        "topics describe",
        "local up",
        "local run",
        "local demo",
        "dlq replay",
    }


@pytest.mark.parametrize("width", [80, 100])
def test_help_fills_the_lines_of_the_terminal(width: int) -> None:
    shown = CliRunner().invoke(app, ["submit", "--help"], terminal_width=width, env={"COLUMNS": str(width)})
    described = [line.strip() for line in shown.output.partition("╭")[0].splitlines()[3:]]
    for line, following in pairwise(described):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > width - 2, f"{line} / {following}"


def test_every_exit_code_is_listed() -> None:
    page = write()
    assert all(f"| {int(code)} | " in page and code.meaning in page for code in Exit)


def test_every_command_but_the_demo_can_speak_json() -> None:
    sections = write().split("### headrace ")[1:]
    without = [section.splitlines()[0] for section in sections if "| `--json` |" not in section]
    assert without == ["local demo"]
