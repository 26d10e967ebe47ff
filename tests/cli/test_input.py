"""What is taken for a file of jobs, and what is told of everything else."""

import bz2
import gzip
import json
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.input import open_input

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
    "CR alone": LINES.replace("\n", "\r").encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_only_looks_like_lines_is_refused_with_a_command_that_makes_them(
    form: str, tmp_path: Path
) -> None:
    file = tmp_path / "my jobs"
    file.write_bytes(FORMS[form])
    with pytest.raises(Failure, match="Nothing was sent") as caught, open_input(str(file)):
        pass
    assert caught.value.exit_code is Exit.USAGE
    command = caught.value.remedy.removeprefix("Try `").removesuffix(" | headrace submit -`.")
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"this machine has no {command.split()[0]}")
    made = subprocess.run(command, shell=True, capture_output=True, check=True).stdout
    assert [json.loads(line) for line in made.splitlines()] == JOBS


def test_a_submit_of_such_a_file_ends_before_anything_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl.gz"
    file.write_bytes(FORMS["gzip"])
    nobody = {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "HEADRACE_STATE_DIR": str(tmp_path)}
    for arguments in (("submit", str(file)), ("local", "run", str(file))):
        result = CliRunner().invoke(app, arguments, env=nobody)
        assert result.exit_code == Exit.USAGE
        assert f"zcat {file} | headrace submit -" in result.output


@pytest.mark.parametrize("first", [b"not json", b'{"prompt": "a"', b"\xef\xbb\xbf{}", b"\xff", b"\n\n{}"])
def test_a_bad_line_at_the_top_is_no_more_than_that(first: bytes, tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    file.write_bytes(first + b"\n" + LINES.encode())
    with open_input(str(file)) as lines:
        assert b"".join(lines) == file.read_bytes()
