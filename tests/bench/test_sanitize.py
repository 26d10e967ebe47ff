"""What runs under memcheck covers every kernel, and is there: a stale choice is told before anything runs."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))  # behind the harness, which has a pipeline.py too

import sanitize  # noqa: E402


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return sanitize.collect()


def test_every_choice_has_tests_and_every_run_gets_them(ids: list[str]) -> None:
    planned = {run.name: [word for word in run.command if "::" in word] for run in sanitize.runs(ids)}
    assert planned.pop("planted") == []
    assert all(planned.values())
    assert all("test_engine.py" in name for run in ("engine", "engine with graphs") for name in planned[run])


def test_every_kernel_has_a_choice() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "kernels").glob("*.py")}
    assert {name for name, text in sources.items() if "_kernel(" in text} == sanitize.KERNELS.keys()


def test_a_choice_that_no_test_answers_is_an_error(ids: list[str]) -> None:
    with pytest.raises(sanitize.Stale, match="'test_tokens_are' and '1024-none-1'"):
        sanitize.chosen(ids, [("test_silu_mul",), ("test_tokens_are", "1024-none-1")])
