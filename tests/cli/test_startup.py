"""The command starts fast, because it imports what a command needs only when that command runs."""

import subprocess
import sys
from pathlib import Path

HEAVY = (
    "torch",
    "transformers",
    "confluent_kafka",
    "sqlalchemy",
    "psycopg",
    "alembic",
    "psutil",
    "headrace.engine",
)


def imported_by(*arguments: str) -> set[str]:
    code = (
        "import sys\n"
        "from headrace.cli import app\n"
        f"sys.argv = ['headrace', *{list(arguments)!r}]\n"
        "try:\n    app()\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_no_heavy_module() -> None:
    assert imported_by("--help").isdisjoint(HEAVY)


def test_help_of_a_command_imports_no_heavy_module() -> None:
    assert imported_by("worker", "--help").isdisjoint(HEAVY)


def test_the_version_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headrace", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("headrace ")


INTERRUPTED = """
import signal, sys
from headrace.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this

class InTheMiddle:
    def find_spec(self, name, *rest):
        if name == "headrace.cli.jobs":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, InTheMiddle())
main()
"""


def test_a_ctrl_c_while_modules_are_imported_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_process_beside_the_engine_s_loads_no_torch(tmp_path: Path, smollm: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "Water is", "sampling": {"max_tokens": 2}}\n')
    answers = tmp_path / "answers.jsonl"
    loaded = imported_by("generate", str(source), str(answers), "--model", str(smollm), "--device", "cpu")
    assert '"succeeded"' in answers.read_text()
    assert "transformers" in loaded
    assert "torch" not in loaded
