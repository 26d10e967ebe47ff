"""compute-sanitizer's memcheck over every kernel and the engine, all at once and in a bounded time.

    python bench/sanitize.py --limit 240

The tests to run are chosen by parts of their names, and looked up before anything runs: a choice that no test answers is an
error, not a kernel passed over. Kernels with C++ names (``_Z...``: torch's own) are left out. Every tensor is an allocation
of its own (no caching allocator), so that one byte past its end is found; that rules graphs out, which have a run of their
own, over torch's memory pools. A planted write out of bounds shows that the tool sees our kernels at all. Exit status 0 when
the planted one is found and nothing else is.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOUND = 9
MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "3",
            "--kernel-name-exclude", "kernel_substring=_Z"]  # fmt: skip
# Without the project's settings: they name plugins that a GPU machine may lack.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir=.", "--import-mode=importlib",
          "-p", "no:cacheprovider"]  # fmt: skip
EVERY_TENSOR_ITS_OWN = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# Each kernel's module, and tests that launch it: parts of a test's id, all of which it must have.
PREFILL = "test_prefill_attention_agrees_with_its_reference"
KERNELS: dict[str, list[tuple[str, ...]]] = {
    "decode_attention": [("test_decode_attention", "-short ones-"), ("test_decode_attention", "-a long one-"),
                         ("test_splits_have_every_key",), ("test_a_step_s_splits",)],
    "edit_logits": [("test_edits_of_logits",)],
    "logprobs": [("test_logprobs",)],
    "mask_logits": [("test_masks",)],
    "matmul": [("test_matmul_agrees", "[True-"), ("test_a_row_s_matmul",)],
    "prefill_attention": [(f"{PREFILL}[any GPU-", "block edges"), (f"{PREFILL}[any GPU-", "chunks"), ("test_attention_reads_blocks",),
                          ("test_batch_invariant_prefill", "(8, 2, 128)")],
    "prefill_hopper": [(f"{PREFILL}[Hopper-", "chunks"), (f"{PREFILL}_over_many_tiles",), ("test_a_step_s_tiles", "(7, 1, 128)")],
    "query_tiles": [("test_prefill_s_tiles",)],
    "rms_norm": [("test_rms_norm",), ("test_add_rms_norm",)],
    "rope_cache": [("test_rope_and_cache", "[32-True-")],
    "sample": [("test_sampling_chooses",), ("test_sampling_with_top_p",), ("test_sampling_ends",), ("test_the_edges_of_the_filters",)],
    "segment_sum": [("test_sums_of_runs",)],
    "shared_prefix": [("test_rows_that_share_a_prefix",)],
    "silu_mul": [("test_silu_mul",)],
    "step_inputs": [("test_step_inputs",)],
    "swiglu_hopper": [("test_swiglu",)],
}  # fmt: skip
ENGINE = [("test_tokens_are_those_of_the_cpu", "[1024-False-1]")]
ENGINE_WITH_GRAPHS = [("test_tokens_are_those_of_the_cpu", "[1024-True-1]")]
ATTENTION = ("decode_attention", "prefill_attention", "prefill_hopper", "shared_prefix")


class Run(NamedTuple):
    """A command under memcheck, and what its exit status should be."""

    name: str
    command: list[str]
    environment: dict[str, str]
    expected: int = 0


class Stale(Exception):
    """A choice that no test answers."""


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests/harness"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def collect() -> list[str]:
    """The ids of the GPU's tests of kernels and engine."""
    command = [*PYTEST, "--collect-only", "tests/gpu/test_kernels.py", "tests/gpu/test_engine.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise RuntimeError(f"pytest cannot collect tests/gpu: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ids


def chosen(ids: Sequence[str], choices: Iterable[tuple[str, ...]]) -> list[str]:
    """The ids that have all parts of a choice, in the order of ids. Raises Stale where a choice has none."""
    found: set[str] = set()
    for parts in choices:
        answers = [name for name in ids if all(part in name for part in parts)]
        if not answers:
            raise Stale(
                f"no test in tests/gpu has {' and '.join(map(repr, parts))} in its id: mend bench/sanitize.py"
            )
        found.update(answers)
    return [name for name in ids if name in found]


def runs(ids: Sequence[str]) -> list[Run]:
    """What to run, given the ids of all tests."""

    def tests(choices: Iterable[tuple[str, ...]]) -> list[str]:
        return [*PYTEST, "-x", *chosen(ids, choices)]

    attention = [choice for kernel in ATTENTION for choice in KERNELS[kernel]]
    others = [choice for kernel in KERNELS.keys() - set(ATTENTION) for choice in KERNELS[kernel]]
    return [
        Run("planted", [sys.executable, "bench/planted_write.py"], EVERY_TENSOR_ITS_OWN, FOUND),
        Run("attention", tests(attention), EVERY_TENSOR_ITS_OWN),
        Run("other kernels", tests(others), EVERY_TENSOR_ITS_OWN),
        Run("engine", tests(ENGINE), EVERY_TENSOR_ITS_OWN),
        Run("engine with graphs", tests(ENGINE_WITH_GRAPHS), {}),
    ]


def start(run: Run, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [*MEMCHECK, *run.command], cwd=ROOT, env=environment() | run.environment, stdout=file, stderr=file,
            start_new_session=True,
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
    parser.add_argument("--limit", type=float, default=240, help="seconds for all runs together")
    parser.add_argument("--logs", type=Path, help="keep the whole output here")
    parser.add_argument("--list", action="store_true", help="say which tests would run, and run none")
    args = parser.parse_args()
    try:
        planned = runs(collect())
    except Stale as stale:
        parser.error(str(stale))
    if args.list:
        for run in planned:
            print(run.name, *(word for word in run.command if "::" in word), sep="\n    ")
        return 0
    deadline = time.monotonic() + args.limit
    good = True
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        started = [
            (run, log := logs / f"{run.name}.log".replace(" ", "-"), start(run, log)) for run in planned
        ]
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
