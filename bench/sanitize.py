"""compute-sanitizer's memcheck over the kernels and the engine, all at once and in a bounded time.

    python bench/sanitize.py --limit 90

Kernels with C++ names (``_Z...``: torch's own) are left out. Every tensor is an allocation of its own (no caching
allocator), so that one byte past its end is found; that rules graphs out, which have a run of their own, over torch's
memory pools. A planted write out of bounds shows that the tool sees our kernels at all. Exit status 0 when the planted
one is found and nothing else is.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOUND = 9
MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "3",
            "--kernel-name-exclude", "kernel_substring=_Z"]  # fmt: skip
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "default", "-p", "no:cacheprovider"]
EVERY_TENSOR_ITS_OWN = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
ATTENTION = (
    "(prefill and (block or chunks)) or (decode and whole and not captured) or any_size or share_a_prefix"
)
THE_REST = "rms_norm or silu or (rope and 32-True) or sampling or filters or step_inputs"


class Run(NamedTuple):
    """A command under memcheck, and what its exit status should be."""

    name: str
    command: list[str]
    environment: dict[str, str]
    expected: int = 0


def tests(file: str, chosen: str) -> list[str]:
    return [*PYTEST, f"tests/gpu/{file}", "-k", chosen]


RUNS = [
    Run("planted", [sys.executable, "bench/planted_write.py"], EVERY_TENSOR_ITS_OWN, FOUND),
    Run("attention", tests("test_kernels.py", ATTENTION), EVERY_TENSOR_ITS_OWN),
    Run("other kernels", tests("test_kernels.py", THE_REST), EVERY_TENSOR_ITS_OWN),
    Run("engine", tests("test_engine.py", "tokens_are and 1024-none-1"), EVERY_TENSOR_ITS_OWN),
    Run("engine with graphs", tests("test_engine.py", "tokens_are and 1024-all-2"), {}),
]


def start(run: Run, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | run.environment
    with log.open("wb") as file:
        return subprocess.Popen(
            [*MEMCHECK, *run.command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )  # fmt: skip


def status_by(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Its exit status; None where it had to be ended."""
    try:
        return process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=90, help="seconds for all runs together")
    parser.add_argument("--logs", type=Path, help="keep the whole output here")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    good = True
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        started = [(run, log := logs / f"{run.name}.log".replace(" ", "-"), start(run, log)) for run in RUNS]
        for run, log, process in started:
            status = status_by(process, deadline)
            good &= status == run.expected
            lines = log.read_text(errors="replace").splitlines()
            said = [
                line for line in lines if "ERROR SUMMARY" in line or " passed" in line or " failed" in line
            ]
            print(f"{run.name}: exit {'none in time' if status is None else status}, expected {run.expected}")
            print(
                "\n".join("    " + line for line in (said if status == run.expected else lines[-15:])),
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
