"""bench/tiers.py runs where the GPU machine's few packages are all there is, and keeps its promise in steps, not in time."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = ("pydantic", "pydantic_settings", "confluent_kafka", "sqlalchemy", "psycopg", "alembic", "orjson", "typer",
           "structlog", "prometheus_client")  # fmt: skip
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({MISSING}))
sys.path.insert(0, "bench")
sys.argv[0] = "bench/tiers.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = (
    "--model tiny --device cpu --slots 8 --kv-tokens 640 --places 12 --bulk 150 --rate 5 --seconds 2 --longest 24"
    " --reps 1"
)


def test_an_interactive_job_runs_within_two_steps_of_its_arrival_whatever_is_scarce(tmp_path: Path) -> None:
    out = tmp_path / "tiers.json"
    command = [sys.executable, "-c", RUN, *SMALL.split(), "--out", str(out), "--commit", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    result = json.loads(out.read_text())
    assert result["options"]["places"] == 12
    rows = {(row["scarce"], row["feed"]): row for row in result["rows"]}
    assert {scarce for scarce, _ in rows} == {"slots", "blocks"}
    for scarce in ("slots", "blocks"):
        tiers, fifo = rows[scarce, "tiers"], rows[scarce, "fifo"]
        assert tiers["wait_steps_p95"] <= 2
        assert fifo["wait_steps_p95"] > 10, "there was no backlog to overtake"
        assert tiers["bulk_share"] == fifo["bulk_share"]
        assert rows[scarce, "contended"]["bulk_share"] < 0.5
