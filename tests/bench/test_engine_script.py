"""bench/engine.py on the CPU, with a tiny model: what it prints, keeps and traces."""

import gc
import gzip
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_a_workload_s_rows_are_kept_printed_and_traced(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "bench/engine.py", "--device", "cpu", "--model", "tiny", "--workload", "chat", "--limit", "2",
         "--trace", str(tmp_path / "trace"), "--trace-at", "5", "--out", str(out), "--commit", "none"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(out.read_text())
    assert content["options"]["limit"] == 2
    (row,) = content["rows"]
    assert row["between_steps_share"] is None, "nothing tells it on the CPU"

    *_, names, values, last = done.stdout.splitlines()
    assert last == f"these rows are in {out}"
    assert names.split()[:3] == ["model", "workload", "s"]
    assert values.split()[:2] == ["tiny", "chat"]
    assert "-" in values.split()

    with gzip.open(tmp_path / "trace.tiny.chat.json.gz") as trace:
        assert any(event.get("name") == "aten::mm" for event in json.load(trace)["traceEvents"])


def test_a_gpu_s_rows_have_a_file_by_its_name_and_a_cpu_s_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    default_out = runpy.run_path(str(ROOT / "bench/engine.py"))["default_out"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert default_out("cuda") == ROOT / "bench/results/engine-nvidia-h200.json"
    assert default_out("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_out("cuda") is None


def test_the_idle_share_counts_what_no_kernel_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    gaps = runpy.run_path(str(ROOT / "bench/engine.py"))["gaps"]
    assert gaps([]) == (0.0, 0.0)
    assert gaps([(5.0, 7.0)]) == (0.0, 2.0)
    # One within another, two that overlap, and gaps of 1 and of 3.
    assert gaps([(0.0, 10.0), (2.0, 4.0), (11.0, 13.0), (12.0, 14.0), (17.0, 20.0)]) == (4.0, 20.0)


def test_windows_lie_in_the_middles_of_equal_parts_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    script = runpy.run_path(str(ROOT / "bench/engine.py"))
    starts, length = script["window_starts"], script["WINDOW_STEPS"]
    assert starts(1000, 4) == [125 - length // 2, 375 - length // 2, 625 - length // 2, 875 - length // 2]
    assert starts(2 * length, 8) == [length // 2]
    assert starts(length, 8) == starts(1000, 0) == []
    crowded = starts(100, 50)
    assert all(b - a >= length for a, b in itertools.pairwise(crowded))
    assert crowded[0] >= 0
    assert crowded[-1] + length <= 100


def test_a_pass_for_the_idle_share_leaves_the_engine_empty_and_tells_nothing_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    script = runpy.run_path(str(ROOT / "bench/engine.py"))
    real = torch.profiler.profile
    cpu = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: real(activities=cpu))
    engine, parts, _ = script["random_engine"]("tiny", device="cpu")
    work = [([1, 2, 3], 60), ([4, 5], 30)]
    assert script["idle_share"](engine, parts, work, steps=60, windows=2) is None
    assert not engine.has_work
    assert gc.isenabled()
    engine.close()
