"""The Triton kernels without a GPU: tests/gpu/test_kernels.py, in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "operations",
    [
        "norm or silu or rope or step or sums",
        "matmul",
        "prefill or blocks",
        "decode",
        "sampling or filters",
        "edits or logprobs or masks",
    ],
)
def test_kernels_agree_with_their_references_in_the_interpreter(operations: str) -> None:
    # The interpreter is chosen when the kernels are imported, for the whole process: so in one of its own.
    # It computes in numpy: on infinities that a masked lane holds, too.
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "-W", "ignore::RuntimeWarning", "-k", operations, str(ROOT / "tests/gpu/test_kernels.py"),
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 0
