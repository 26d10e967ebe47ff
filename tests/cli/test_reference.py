"""docs/cli.md is what the commands say of themselves."""

from pathlib import Path

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


def test_every_exit_code_is_listed() -> None:
    page = write()
    assert all(f"| {int(code)} | " in page and code.meaning in page for code in Exit)


def test_every_command_but_the_demo_can_speak_json() -> None:
    sections = write().split("### headrace ")[1:]
    without = [section.splitlines()[0] for section in sections if "| `--json` |" not in section]
    assert without == ["local demo"]
