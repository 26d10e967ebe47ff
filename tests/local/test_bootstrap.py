"""`make` and `.ci/run`: what is installed when, and what makes CI fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def plan(*arguments: str, **variables: str) -> str:
    """What make would do."""
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_VENV"} | variables
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Makefile tells what it was asked for; ``check`` and ``test`` fail where a file says so."""
    folder = tmp_path / "checkout"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / "Makefile").write_text(
        "venv:\n\t@mkdir -p .venv && echo venv >> .venv/log\n"
        "check:\n\t@echo check >> log; test ! -e check-fails\n"
        "test:\n\t@echo test >> log; test ! -e test-fails\n"
    )
    return folder


def ci(checkout: Path, cache: Path, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_VENV"}
    environment |= {"XDG_CACHE_HOME": str(cache), **variables}
    return subprocess.run(
        [checkout / ".ci" / "run"], env=environment, capture_output=True, check=False
    ).returncode


def test_a_given_environment_is_never_installed_into(tmp_path: Path) -> None:
    steps = plan("demo", HEADRACE_VENV=str(tmp_path))
    assert "pip" not in steps
    assert f"{tmp_path}/bin/python -m headrace local demo" in steps


def test_tests_that_kill_things_are_apart() -> None:
    assert 'pytest -m "not stress"' in plan("test")
    assert "pytest -m stress" in plan("stress")


@pytest.mark.parametrize("failing", ["check", "test"])
def test_ci_runs_both_and_fails_when_either_does(checkout: Path, tmp_path: Path, failing: str) -> None:
    (checkout / f"{failing}-fails").touch()
    assert ci(checkout, tmp_path / "cache") == 1
    assert (checkout / "log").read_text().split() == ["check", "test"]


def test_ci_is_content_when_both_are(checkout: Path, tmp_path: Path) -> None:
    assert ci(checkout, tmp_path / "cache") == 0


def test_ci_uses_an_environment_that_was_kept(checkout: Path, tmp_path: Path) -> None:
    assert ci(checkout, tmp_path / "cache") == 0
    shutil.rmtree(checkout / ".venv")
    assert ci(checkout, tmp_path / "cache") == 0
    assert (checkout / ".venv" / "log").read_text().split() == [
        "venv",
        "venv",
    ]  # made once, brought up to date once
    (checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    shutil.rmtree(checkout / ".venv")
    assert ci(checkout, tmp_path / "cache") == 0
    assert (checkout / ".venv" / "log").read_text().split() == ["venv"]


def test_ci_works_without_a_cache(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    assert ci(checkout, tmp_path / "cache") == 0


def test_ci_takes_a_given_environment_as_it_is(checkout: Path, tmp_path: Path) -> None:
    assert ci(checkout, tmp_path / "cache", HEADRACE_VENV=str(tmp_path)) == 0
    assert not (checkout / ".venv").exists()
