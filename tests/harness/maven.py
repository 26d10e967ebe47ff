"""What Maven resolves for the tests, kept in the user's cache."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def resolve(
    pom: Path, name: str, *options: str, unpack: Callable[[Path], None] = lambda folder: None
) -> Path | None:
    """The folder ``name`` of the cache with the dependencies of ``pom``; None where they cannot be had.

    options: for Maven's command line. unpack: what else is to happen in the folder before it is kept.
    """
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / name
    if target.is_dir():
        return target
    if not shutil.which("mvn"):
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={building}", "-DincludeScope=runtime"]
        command = ["mvn", "-q", "-B", "-f", str(pom), *options, *goal]
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        unpack(building)
        building.rename(target)  # atomic; a loser of a race finds a non-empty target
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(building, ignore_errors=True)
        if not target.is_dir():
            print(f"maven: no {name} ({error})", file=sys.stderr)
            return None
    return target
