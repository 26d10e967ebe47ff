"""`headrace generate`: the engine alone, files in and files out."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.exits import Exit

LINES = [
    {
        "custom_id": "first",
        "prompt": "The capital of France is",
        "sampling": {"max_tokens": 3, "temperature": 0},
    },
    {"custom_id": "bad", "prompt": "x", "sampling": {"top_p": 7}},
    {
        "custom_id": "openai",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 3, "temperature": 0},
    },
]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADRACE_KV_TOKENS", "4096")
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_results_go_to_no_file_of_the_name_that_elsewhere_is_stdout(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["generate", str(source), "-"])
    assert result.exit_code == Exit.USAGE
    assert "Results go to a file, not to stdout" in result.output
    assert not Path("-").exists()


@pytest.mark.timeout(600)
def test_a_file_is_answered_and_taken_up_again(source: Path, tmp_path: Path, smollm: Path) -> None:
    target = tmp_path / "out.jsonl"
    command = ["generate", str(source), str(target), "--model", str(smollm), "--device", "cpu", "--json"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout.splitlines()[-1])["succeeded"] == 2
    results = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert "Paris" in results["first"]["choices"][0]["text"]
    assert results["first"]["model"] == smollm.name
    assert "top_p" in results["bad"]["error"]["message"]
    assert results["openai"]["state"] == "succeeded"

    with source.open("a") as more:
        more.write(json.dumps(LINES[0] | {"custom_id": "later"}) + "\n")
    again = CliRunner().invoke(app, [*command, "--resume"])
    summary = json.loads(again.stdout.splitlines()[-1])
    assert (summary["succeeded"], summary["skipped"]) == (1, 3)
    assert len(target.read_text().splitlines()) == 4


def test_an_output_that_is_there_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("somebody's results\n")
    result = CliRunner().invoke(app, ["generate", str(source), str(target)])
    assert result.exit_code == Exit.REFUSED
    assert "--resume" in result.output
    assert target.read_text() == "somebody's results\n"


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused_as_submit_refuses_it_and_nothing_is_made(
    text: str, source: Path, tmp_path: Path
) -> None:
    source.write_text(text)
    target = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["generate", str(source), str(target)])
    assert result.exit_code == Exit.USAGE
    assert "it is empty" in result.output
    assert not target.exists()


def test_no_model_is_loaded_where_nothing_is_left_to_do(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    command = ["generate", str(source), str(target), "--model", str(tmp_path / "no model"), "--json"]
    assert CliRunner().invoke(app, command).exit_code == Exit.NOT_FOUND
    target.write_text("".join(json.dumps({"line": line, "state": "succeeded"}) + "\n" for line in (1, 2, 3)))
    result = CliRunner().invoke(app, [*command, "--resume"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["skipped"] == 3


def test_a_line_whose_deadline_has_passed_expires_as_in_a_worker_and_no_model_is_loaded_for_it(
    source: Path, tmp_path: Path
) -> None:
    late = {"custom_id": "late", "prompt": "x", "deadline": "2020-01-01T00:00:00Z"}
    source.write_text(json.dumps(late) + "\n" + json.dumps(LINES[1]) + "\n")
    target = tmp_path / "out.jsonl"
    command = ["generate", str(source), str(target), "--model", str(tmp_path / "no model")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "0 done, 1 failed, 1 expired, 0 had a result already" in result.stderr
    results = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert (results["late"]["state"], results["bad"]["state"]) == ("expired", "failed")
    assert results["late"]["error"]["code"] == "deadline_exceeded"
    again = CliRunner().invoke(app, [*command, "--resume", "--json"])
    assert (json.loads(again.stdout)["skipped"], json.loads(again.stdout)["expired"]) == (2, 0)


def test_fields_that_no_job_has_are_named_by_their_line_before_the_model_is_loaded(
    source: Path, tmp_path: Path
) -> None:
    source.write_text('\n{"prompt": "x", "sampling": {"temprature": 0}}\n' * 2)
    command = ["generate", str(source), str(tmp_path / "out.jsonl"), "--model", str(tmp_path / "no model")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == Exit.NOT_FOUND
    named = "line 2: sampling.temprature is no field of a job and is ignored; did you mean sampling.temperature?\n"
    assert result.stderr.count(named) == result.stderr.count("temprature") == 1


def test_the_fields_that_no_job_has_are_in_the_summary_for_programs(source: Path, tmp_path: Path) -> None:
    source.write_text('{"promt": "x"}\n' * 2)
    result = CliRunner().invoke(app, ["generate", str(source), str(tmp_path / "out.jsonl"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["unknown_fields"] == [
        {"path": "promt", "meant": "prompt", "line": 1, "more": 1}
    ]
    assert result.stderr == ""


def test_results_of_another_file_are_not_gone_on_with(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text('{"line": 1, "input": "0123456789abcdef", "state": "succeeded"}\n')
    result = CliRunner().invoke(app, ["generate", str(source), str(target), "--resume"])
    assert result.exit_code == Exit.REFUSED
    assert "another input" in result.output
