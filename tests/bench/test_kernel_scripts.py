"""Every kernel has a script of figures, and bench/kernels/all.py keeps what they say: here in Triton's interpreter."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


def test_all_kernels_figures_are_kept_as_rows(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, "bench/kernels/all.py", "--out", str(out), "--commit", "none"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    rows = json.loads(out.read_text())["rows"]
    for row in rows:
        assert {"kernel", "shape", "us", "share"} < row.keys()
        assert row.keys() & {"TB/s", "TFLOP/s"}
    modules = {path.stem for path in (ROOT / "kernels").glob("*.py") if "_kernel(" in path.read_text()}
    # prefill_attention and swiglu choose the first and the last on a GPU; the other is the first one's, once a step.
    modules -= {"prefill_hopper", "query_tiles", "swiglu_hopper"}
    modules = modules - {"rope_cache"} | {"rope_and_cache", "add_rms_norm", "swiglu"}
    modules |= {"product"}  # the library's
    assert {row["kernel"] for row in rows} == modules


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ([], ["figures"]),
        (["--sweep", "2"], ["a (4,)", "a (8,): ValueError", "b (4,)", "b (8,): ValueError"]),
    ],
)
def test_a_sweep_tries_each_tile_on_the_first_cases_and_names_those_that_do_not_fit(
    options: list[str],
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main_or_sweep = runpy.run_path(str(ROOT / "bench/kernels/timing.py"))["main_or_sweep"]
    kernel = SimpleNamespace()

    def report_case(case: str, tile: str) -> None:
        if kernel._tile("any shape") == (8,):
            raise ValueError
        print(case + tile)

    monkeypatch.setattr(sys, "argv", ["script.py", *options])
    main_or_sweep(lambda: print("figures"), report_case, ["a", "b", "c"], kernel, [(4,), (8,)])
    assert capsys.readouterr().out.splitlines() == printed
