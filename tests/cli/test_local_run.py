"""`headrace local run`: where the results of a file go."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app, local
from headrace.client import Submission


def test_two_runs_of_one_file_keep_both_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = iter(("first", "second"))

    def write(ledger: object, tenant: str, batch_id: str, lines: local.Lines, **_: object) -> int:
        lines._out.write(batch_id.encode())
        return 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "_running", lambda settings, stop, quiet: nullcontext((settings, None)))
    monkeypatch.setattr(local, "send", lambda *_: Submission("default", next(batches), [], 1, []))
    monkeypatch.setattr(local.context, "open_ledger", lambda settings: nullcontext())
    monkeypatch.setattr(local, "follow", lambda *_, **__: None)
    monkeypatch.setattr(local, "write_results", write)
    Path("prompts.jsonl").write_text('{"prompt": "hello"}\n')
    for batch_id in ("first", "second"):
        result = CliRunner().invoke(app, ["local", "run", "prompts.jsonl"])
        assert result.exit_code == 0, result.output
        assert f"1 result in prompts.{batch_id}.results.jsonl" in result.output
    found = {file.name: file.read_text() for file in tmp_path.glob("*.results.jsonl")}
    assert found == {"prompts.first.results.jsonl": "first", "prompts.second.results.jsonl": "second"}
