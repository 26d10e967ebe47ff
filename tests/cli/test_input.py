"""What is taken for a file of jobs, and what is told of everything else."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.input import check_input, open_input

JOBS = [{"custom_id": name, "prompt": "x\r\ny"} for name in ("a", "b")]
LINES = "".join(json.dumps(job) + "\n" for job in JOBS)

FORMS = {
    "gzip": gzip.compress(LINES.encode()),
    "xz": lzma.compress(LINES.encode()),
    "bzip2": bz2.compress(LINES.encode()),
    "array": json.dumps(JOBS).encode(),
    "pretty-printed array": json.dumps(JOBS, indent=2).encode(),
    "pretty-printed objects": "\n".join(json.dumps(job, indent=2) for job in JOBS).encode(),
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16LE": LINES.encode("utf-16-le"),
    "UTF-16BE": LINES.encode("utf-16-be"),
    "UTF-32": LINES.encode("utf-32"),
    "UTF-32LE": LINES.encode("utf-32-le"),
    "UTF-32BE": LINES.encode("utf-32-be"),
    "UTF-32BE with a mark": ("\ufeff" + LINES).encode("utf-32-be"),
    **{
        f"{encoding} without a mark, from {start!r}": (start + LINES).encode(encoding)
        for encoding in ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE")
        for start in (" ", "\n", "\r\n", "\t\n\n ")
    },
    "UTF-16 with a mark, from a blank line": ("\n" + LINES).encode("utf-16"),
    "CR alone": LINES.replace("\n", "\r").encode(),
}


def opened(file: Path) -> None:
    with open_input(str(file), "cat"):
        pass


@pytest.mark.parametrize("look", [opened, check_input])
@pytest.mark.parametrize("form", FORMS)
def test_what_only_looks_like_lines_is_refused_with_a_command_that_makes_them(
    form: str, look: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "my jobs.jsonl"
    file.write_bytes(FORMS[form])
    with pytest.raises(Failure, match="No job was read") as caught:
        look(file)
    assert caught.value.exit_code is Exit.USAGE
    command = caught.value.remedy.removeprefix("Try `").removesuffix("`.")
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"this machine has no {command.split()[0]}")
    printed = subprocess.run(command, shell=True, capture_output=True, check=True).stdout
    made = printed or Path(f"{file}.lines.jsonl").read_bytes()
    assert [json.loads(line) for line in made.splitlines() if line.strip()] == JOBS


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("UTF-")])
def test_an_encoding_that_is_not_utf_8_is_called_by_its_name(form: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_bytes(FORMS[form])
    with pytest.raises(Failure, match=f"is {form[:6]}, and must be UTF-8"):
        check_input(file)


def test_an_array_that_is_not_utf_8_is_made_utf_8_first(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_bytes(FORMS["array"].decode().encode("utf-16-le"))
    with pytest.raises(Failure, match="is UTF-16, and must be UTF-8"):
        check_input(file)


# What takes a file of jobs, and what its remedy says to do with lines that a shell makes of it.
COMMANDS = {
    "submit FILE": "| headrace submit -",
    "local run FILE": "| headrace local run -",
    "local demo FILE": "> FILE.lines.jsonl",
    "generate FILE out": "> FILE.lines.jsonl",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A command in an empty directory, where neither a broker nor a model is."""
    nobody = {
        "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "HEADRACE_MODEL": "none",
        "HEADRACE_STATE_DIR": "state",
    }
    monkeypatch.chdir(tmp_path)
    return lambda command, file: CliRunner().invoke(app, command.replace("FILE", file).split(), env=nobody)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_such_a_file_before_anything_is_asked_for_or_made(
    command: str, run: Callable[..., Result]
) -> None:
    Path("jobs.gz").write_bytes(FORMS["gzip"])
    result = run(command, "jobs.gz")
    assert result.exit_code == Exit.USAGE
    assert "No job was read: jobs.gz is compressed by gzip." in result.output
    assert f"Try `zcat jobs.gz {COMMANDS[command].replace('FILE', 'jobs.gz')}`." in result.output
    assert [path.name for path in Path().iterdir()] == ["jobs.gz"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("file", "exit_code", "message"),
    [
        ("gone", Exit.NOT_FOUND, "There is no gone."),
        ("directory", Exit.USAGE, "directory is a directory."),
        ("blank", Exit.USAGE, "There are no jobs in blank: it is empty."),
    ],
)
def test_every_command_says_the_same_of_what_is_no_file_of_jobs(
    command: str, file: str, exit_code: Exit, message: str, run: Callable[..., Result]
) -> None:
    Path("directory").mkdir()
    Path("blank").write_text("\n \n")
    result = run(command, file)
    assert result.exit_code == exit_code
    assert message in result.output


@pytest.mark.parametrize("command", ["generate FILE out", "local demo FILE"])
@pytest.mark.parametrize("file", ["-", "pipe"])
def test_a_command_that_reads_its_file_again_says_so_of_what_can_be_read_once(
    command: str, file: str, run: Callable[..., Result]
) -> None:
    os.mkfifo("pipe")
    writer = os.open("pipe", os.O_RDWR)
    try:
        result = run(command, file)
    finally:
        os.close(writer)
    assert result.exit_code == Exit.USAGE
    assert f"{'stdin' if file == '-' else file} can be read once" in result.output
    assert "Write the lines to a file" in result.output


@pytest.mark.parametrize("look", [opened, check_input])
@pytest.mark.parametrize(
    "text",
    [b"Tell me a joke.\n", b"custom_id,prompt\na,Hi\n", b"\0\1", b"no object\n" * 100 + LINES.encode()],
)
def test_what_has_no_object_among_its_first_lines_is_refused_with_a_command_for_plain_prompts(
    look: Callable[[Path], None], text: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(text)
    with pytest.raises(Failure, match=r"of the first lines of .* none is a JSON object") as refused:
        look(file)
    assert refused.value.exit_code is Exit.USAGE
    assert f"jq -Rc '{{prompt: .}}' {file} " in refused.value.remedy


@pytest.mark.parametrize(
    "first",
    [
        b"no object\n" * 98 + b"no object",
        b"not json",
        b'{"prompt": "a"',
        b"\xef\xbb\xbf{}",
        b"\xff",
        b"\n\n{}",
        b"\0",
        b"\n\0{}",
    ],
)
def test_a_bad_line_at_the_top_is_no_more_than_that(first: bytes, tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    file.write_bytes(first + b"\n" + LINES.encode())
    with open_input(str(file), "cat") as lines:
        assert b"".join(lines) == file.read_bytes()
