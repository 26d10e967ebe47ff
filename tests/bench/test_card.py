"""The command for a day with a GPU loses nothing: not to a part that fails, nor to one that never ends."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))  # behind the harness, which has a pipeline.py too

import card  # noqa: E402


def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(sys, "argv", ["card.py", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        card.main()
    results = json.loads((tmp_path / "card.json").read_text())
    return ended.value.code, {result["name"]: result for result in results}


def test_parts_that_fail_or_never_end_leave_the_others_their_turn(monkeypatch, tmp_path, capsys):
    write = "import sys; print('all well'); open(sys.argv[1], 'w').write('[1, 2]')"
    parts = [
        card.Part("fails", 120, "-c 'import sys; print(1 / 0)'", None),
        card.Part("hangs", 1, "-c 'import time; time.sleep(600)'", None),
        card.Part("works", 120, f'-c "{write}" OUT', None),
    ]
    monkeypatch.setattr(card, "PARTS", parts)
    code, results = run(monkeypatch, tmp_path)
    assert code == 1
    assert [(name, result["status"]) for name, result in results.items()] == [
        ("fails", 1), ("hangs", None), ("works", 0)
    ]  # fmt: skip
    assert results["fails"]["said"] == "ZeroDivisionError: division by zero"
    assert results["works"]["said"] == "all well"
    assert results["works"]["result"] == [1, 2]
    assert "all well" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path / "again", "--only", "works", "--commit", "abc")[0] == 0


def test_parts_for_which_no_time_is_left_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(card, "PARTS", [card.Part("one", 9, "-c 0", None), card.Part("two", 9, "-c 0", None)])
    code, results = run(monkeypatch, tmp_path, "--minutes", "0")
    assert (code, results) == (1, {})
    assert "not run: --only one,two" in capsys.readouterr().out


def test_a_part_whose_needs_are_not_met_is_passed_over_and_said(monkeypatch, tmp_path, capsys):
    write = "import sys; open(sys.argv[1] + '/trace', 'w')"
    parts = [
        card.Part("lacks", 9, "-c 1/0", None, needs="import no_such_module"),
        card.Part("has", 9, f'-c "{write}" DIR', None, needs="import json"),
    ]
    monkeypatch.setattr(card, "PARTS", parts)
    code, results = run(monkeypatch, tmp_path)
    assert code == 0
    assert [(name, result["status"]) for name, result in results.items()] == [("has", 0)]
    assert (tmp_path / "trace").exists()
    assert "passed over: lacks, for want of what it needs: ModuleNotFoundError" in capsys.readouterr().out


def test_every_part_s_script_is_there_and_each_name_stands_once():
    assert len({part.name for part in card.PARTS}) == len(card.PARTS)
    for part in card.PARTS:
        for command in filter(None, (part.command, part.dry)):
            scripts = [word for word in command.split() if word.endswith(".py")]
            assert scripts
            assert ("OUT" in command) == command.endswith(" OUT")
            assert all((ROOT / script).is_file() for script in scripts)
