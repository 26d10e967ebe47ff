"""One JSON file of measured rows: under what conditions first, then the rows."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def write(
    path: Path | None, rows: list[dict[str, Any]], commit: str | None = None, **conditions: Any
) -> None:
    """Append rows to ``path``; nothing where there is no path. ``commit`` stands in where there is no checkout to ask."""
    if path is None:
        return
    if path.exists():
        content = json.loads(path.read_text())
    else:
        content = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu()}, {torch.get_num_threads()} threads",
            "commit": commit or _commit(), "torch": torch.__version__, **_triton(), **conditions, "rows": [],
        }  # fmt: skip
    content["rows"] += rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str))


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows of the same keys under their names, each column as wide as it must be."""
    cells = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) and value < 1e4 else f"{value:,.0f}" if isinstance(value, float) else str(value)  # fmt: skip


def cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def _triton() -> dict[str, str]:
    try:
        import triton
    except ImportError:
        return {}
    return {"triton": triton.__version__}


def _commit() -> str:
    """This checkout's commit, marked where the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else "unknown"
