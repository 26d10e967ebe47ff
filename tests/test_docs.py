"""Documents that keep their word: links lead somewhere, commands exist, settings are the code's, figures have a source."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli import app
from headrace.settings import Settings, TierSettings, variable

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|json|jsonl|toml|ini|xml))`")


def tracked() -> list[Path]:
    """Files of the repository, links left out (their targets are in it too)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


FILES = tracked()
MARKDOWN = sorted(path for path in FILES if path.suffix == ".md")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """A document without its code."""
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The fragments that a rendered document answers to."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", MARKDOWN, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if re.match(r"https?://", link):
            continue
        target, _, fragment = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{link} leads nowhere"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), f"{link}: {named(file)} has no such heading"


@pytest.mark.parametrize("path", MARKDOWN, ids=named)
def test_files_spoken_of_exist(path: Path) -> None:
    missing = [name for name in PATH.findall(prose(path)) if not (ROOT / name).exists()]
    assert [name for name in missing if not (path.parent / name).exists()] == []


def commands(path: Path) -> Iterator[list[str]]:
    """Every `headrace ...` shown in a document's code blocks, however it is reached, as words."""
    for block in FENCE.findall(path.read_text()):
        for line in block.splitlines():
            if match := re.match(r"\$ (?:\w+=\S+ )*(?:docker compose run (?:-\S+ )*)?(headrace .*)", line):
                yield shlex.split(match[1], comments=True)


@pytest.mark.parametrize("path", MARKDOWN, ids=named)
def test_commands_shown_exist_with_the_options_shown(path: Path) -> None:
    name = named(path)
    for _, *words in commands(path):
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands"):
            assert words, f"{name} shows a command that is not whole"
            word = words.pop(0)
            assert word in command.commands, f"{name} shows `headrace {word}`"
            command = command.commands[word]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help"}, f"{name}: {command.name} knows no {used - known}"


def test_the_readme_shows_commands_by_hand_and_in_docker() -> None:
    shown = [words[1] for words in commands(ROOT / "README.md")]
    expected = "submit status results worker recorder migrate topics generate local doctor"
    assert set(expected.split()) <= set(shown)
    assert shown.count("submit") == 2


def setting_row(field: str) -> str:
    """A line of the settings table, as the code has it."""
    info = Settings.model_fields[field]
    default = "" if info.default_factory else info.default
    shown = ",".join(default) if isinstance(default, tuple) else "" if default is None else str(default)
    patterns = {"kafka": "HEADRACE_KAFKA_<NAME>", "tier": "HEADRACE_TIER__<TIER>__<KNOB>"}
    name = patterns.get(field, variable(field))
    return f"| `{name}` | {f'`{shown}`' if shown else ''} | {info.description} |"


def test_the_settings_table_is_the_code_s() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    rows = [setting_row(field) for field in Settings.model_fields]
    found = [line for line in text.splitlines() if re.match(r"\| `(HEADRACE_|KAFKA_|DATABASE_)", line)]
    assert found == rows, "docs/operations.md should have these rows:\n" + "\n".join(rows)


@pytest.mark.parametrize("path", MARKDOWN, ids=named)
def test_settings_spoken_of_exist(path: Path) -> None:
    spoken = set(re.findall(r"\bHEADRACE_[A-Z_]*[A-Z]\b", path.read_text()))
    spoken = {re.sub(r"(?<=_TIER)__[A-Z]+__", "__", name) for name in spoken}  # whichever tier
    known = {variable(field) for field in Settings.model_fields}
    unknown = spoken - known - {variable("tier", knob) for knob in TierSettings.model_fields}
    assert {name for name in unknown if not re.match(r"HEADRACE_(KAFKA_|TEST_|VENV$)", name)} == set()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_nothing_names_a_developer_s_machine_or_a_package_registry(path: Path) -> None:
    text = path.read_bytes().decode(errors="ignore")
    machine = r"(?<![\w.-])/(?:root|Users|home/(?!appuser)\w+|work/(?:main|shared)|tmp/\w+/)"
    registry = (
        r"pypi\.org|pythonhosted\.org|npmjs\.(?:com|org)|maven\.org|maven\.apache\.org/maven2|debian\.org"
    )
    assert re.findall(rf"{machine}|\.\./shared|{registry}", text) == []


def sections(path: Path) -> list[str]:
    return re.split(r"^## ", prose(path), flags=re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in MARKDOWN if path.parent.name != "bench"], ids=named)
def test_a_table_of_figures_cites_the_run_that_gave_them(path: Path) -> None:
    for section in sections(path):
        rows = [line for line in section.splitlines() if line.startswith("|")]
        measured = [
            row for row in rows if re.search(r"\d (?:s|ms|GB/s|TB/s|TFLOP/s|tokens/s|tok/s|jobs/s) \|", row)
        ]
        if measured:
            cited = re.findall(r"bench/(results/[\w.-]+|LOG\.md)", section)
            assert cited, f"{measured[0]} has no source"
            assert all((ROOT / "bench" / name).exists() for name in cited)


def test_the_table_of_faults_names_every_stress_test_and_none_that_is_not_there() -> None:
    folder = ROOT / "tests/stress"
    named = re.findall(r"\[`(test_\w+)`\]\((\S+?)\)", (folder / "README.md").read_text())
    assert [name for name, file in named if f"def {name}(" not in (folder / file).read_text()] == []
    tests = {
        name
        for file in folder.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert tests <= {name for name, _ in named}


def test_the_change_log_names_the_version_and_begins_with_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
