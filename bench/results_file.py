"""One JSON file of measured rows: under what conditions first, then the rows.

Opened before anything is measured, so that a file of another commit, device or option is noticed then and not afterwards.
"""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


class ResultsFile:
    """Rows that were measured under the same conditions, by one run or several."""

    def __init__(
        self, path: Path | None, commit: str | None = None, *, device: str = "cuda", **conditions: Any
    ) -> None:
        """Nothing is written before there are rows, and nothing at all where there is no path.

        commit: stands in where there is no checkout to ask. device: as torch names it; without a GPU it is the CPU.
        conditions: what else holds for all rows. Raises SystemExit where the file's conditions are others: rows appended
        to it would pass for what they are not.
        """
        self._path = path
        told = {
            "device": device_name(device), "commit": commit or _commit(), "torch": torch.__version__, **_triton(),
            **conditions,
        }  # fmt: skip
        self._conditions = json.loads(_json(told))  # as they are read back
        if path:
            self._content(path)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Write rows behind those that are there. Raises ValueError for a number that JSON lacks: NaN, or an infinity."""
        if self._path is None:
            return
        content = self._content(self._path)
        content["rows"] += rows
        text = _json(content)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(text)

    def _content(self, path: Path) -> dict[str, Any]:
        """What the file holds, or would hold without rows."""
        if not path.exists():
            return self._conditions | {"rows": []}
        try:
            content = json.loads(path.read_text())
            there = _flat({name: value for name, value in content.items() if name != "rows"})
            list(content["rows"])
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise SystemExit(f"--out: {path} holds no results ({error!r}); name another file") from error
        here = _flat(self._conditions)
        if there != here:
            raise SystemExit(
                f"--out: the rows in {path} are of other conditions; name another file\n{_differing(there, here)}"
            )
        return content


def _differing(there: dict[str, Any], here: dict[str, Any]) -> str:
    """A line for each name whose values differ, or that one side does not tell."""
    lines = [
        f"  {name}: {there.get(name, 'not told')} there, {here.get(name, 'not told')} here"
        for name in here | there
        if there.get(name, ...) != here.get(name, ...)
    ]
    return "\n".join(lines)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str, allow_nan=False)


def _flat(conditions: dict[str, Any]) -> dict[str, Any]:
    """Conditions by name, and those of a group (options, ceilings) by the group's and their own."""
    flat: dict[str, Any] = {}
    for name, value in conditions.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows of the same keys under their names, each column as wide as it must be."""
    cells = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _short(value: Any) -> str:
    """A few digits of a number, and a dash for what there is none of."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def device_name(device: str = "cuda") -> str:
    """The GPU's name; the CPU's with its threads where ``device`` says so, or there is no GPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return f"{cpu()}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name()


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
