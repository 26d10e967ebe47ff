"""Reads a Hugging Face directory's safetensors, by mmap and a shard at a time."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.engine.errors import BadCheckpoint
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import Model, build_model
from headrace.engine.numerics import FAST, Numerics

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_model(
    path: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics = FAST,
    max_context: int | None = None,
) -> Model:
    """Build the model of a directory and fill it. Raises as ``ModelConfig.from_directory``, which has max_context."""
    path = Path(path)
    model = build_model(ModelConfig.from_directory(path, max_context), device, dtype, numerics)
    model.load(iterate_safetensors(path))
    return model


def iterate_safetensors(path: str | Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the directory's shards with its name, in its stored dtype."""
    for file in _shards(Path(path)):
        try:
            with safe_open(file, framework="pt", device=str(device)) as shard:
                for name in shard.keys():  # noqa: SIM118 (a shard is no dict)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{file.name} is damaged: {error}") from error


def _shards(path: Path) -> list[Path]:
    if (path / _INDEX).is_file():
        try:
            names = sorted(
                set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadCheckpoint(f"{_INDEX} cannot be read: {error}") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise BadCheckpoint(f"{_INDEX} names shards that are not there: {', '.join(missing)}")
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if any(path.glob("*.bin")):
        raise BadCheckpoint(
            f"{path} holds pickled weights only; run `headrace convert {path} DIRECTORY` first"
        )
    raise BadCheckpoint(f"{path} holds no {_SINGLE} and no {_INDEX}")
