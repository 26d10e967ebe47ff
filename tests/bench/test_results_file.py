"""Rows of a benchmark stand under their own conditions: a file of others is refused before anything is measured."""

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))  # behind the harness, which has a pipeline.py too

from results_file import ResultsFile, table  # noqa: E402


def test_runs_under_the_same_conditions_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "folder/rows.json"
    for speed in (1.0, 2.0):
        results = ResultsFile(path, "abc", device="cpu", options={"lag": 1, "sizes": (4, 8)})
        assert path.exists() == (speed > 1), "a run that measures nothing leaves nothing"
        results.append([{"speed": speed}])
        results.append([{"speed": -speed}])
    content = json.loads(path.read_text())
    assert content.pop("rows") == [{"speed": speed} for speed in (1.0, -1.0, 2.0, -2.0)]
    assert content["commit"] == "abc"
    assert content["options"] == {"lag": 1, "sizes": [4, 8]}
    assert {"device", "torch"} < content.keys()


@pytest.mark.parametrize(
    ("commit", "conditions", "differing"),
    [
        ("def", {"options": {"lag": 1}}, "commit: abc there, def here"),
        ("abc", {"options": {"lag": 2}}, "options.lag: 1 there, 2 here"),
        ("abc", {"options": {"lag": 1, "limit": None}}, "options.limit: not told there, None here"),
        ("abc", {}, "options.lag: 1 there, not told here"),
    ],
)
def test_a_file_of_other_conditions_is_refused_and_left_as_it_is(
    commit: str, conditions: dict, differing: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    ResultsFile(path, "abc", options={"lag": 1}).append([{"speed": 1}])
    before = path.read_text()
    with pytest.raises(SystemExit) as refused:
        ResultsFile(path, commit, **conditions)
    first, *lines = str(refused.value).splitlines()
    assert first.startswith("--out: ")
    assert str(path) in first
    assert [line.strip() for line in lines] == [differing]
    assert path.read_text() == before


def test_rows_are_not_written_into_a_file_that_another_run_has_begun_meanwhile(tmp_path: Path) -> None:
    ours, theirs = (ResultsFile(tmp_path / "rows.json", commit) for commit in ("abc", "def"))
    theirs.append([{"speed": 1}])
    with pytest.raises(SystemExit, match="commit: def there, abc here"):
        ours.append([{"speed": 2}])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}'])
def test_a_file_that_holds_no_results_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="holds no results"):
        ResultsFile(path)
    with pytest.raises(SystemExit, match="holds no results"):
        ResultsFile(tmp_path)


def test_a_number_that_json_lacks_is_refused_and_costs_no_rows(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "rows.json")
    results.append([{"share": None}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.append([{"share": float("nan")}])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [{"share": None}]


def test_columns_stand_apart_and_what_there_is_none_of_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    table(
        [{"rate": 25235.3, "total": 1.08512e6, "share": 0.123456}, {"rate": 3.0, "total": 7, "share": None}]
    )
    assert capsys.readouterr().out.splitlines() == [
        "  rate      total   share",
        "25,235  1,085,120  0.1235",
        "     3          7       -",
    ]


# A model that there is not: whoever builds one before looking at the file fails by that.
SCRIPTS = {
    "engine.py": "--model none --workload chat",
    "flips.py": "--model none",
    "graphs.py": "--model none",
    "halves.py": "--model none",
    "kernels/all.py": "",
    "loading.py": "ready --model none",
    "mixed_steps.py": "--model none",
    "options.py": "",
    "pipeline.py": "",
    "rolling.py": "--model none",
    "tiers.py": "",
    "vs_transformers.py": "--model none",
}


def test_every_script_that_keeps_rows_is_among_those_tried() -> None:
    keeping = {path for path in BENCH.rglob("*.py") if "results_file.ResultsFile(" in path.read_text()}
    assert {str(path.relative_to(BENCH)) for path in keeping} == SCRIPTS.keys()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_refuses_a_file_of_other_conditions_before_it_measures(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"commit": "of another day", "rows": []}')
    monkeypatch.setattr(sys, "argv", [script, *SCRIPTS[script].split(), "--out", str(path)])
    monkeypatch.setattr(sys, "path", [str((BENCH / script).parent), *sys.path])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    assert "--out: " in f"{refused.value}{capsys.readouterr().err}"
    assert path.read_text() == '{"commit": "of another day", "rows": []}'
