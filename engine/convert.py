"""Turn a GGUF file, or a directory of pickled weights, into a Hugging Face directory with safetensors.

The result loads in Transformers as well as here. GGUF weights are dequantised to bfloat16.
"""

import json
import pickle
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine.errors import BadCheckpoint, EngineError
from headrace.engine.gguf_file import GGUFModel
from headrace.engine.models.config import read_json

SHARD_BYTES = 4 << 30

Shard = Iterable[tuple[str, Tensor]]


def convert(src: str | Path, dst: str | Path) -> Path:
    """Write ``src`` (a .gguf file, or a directory with .bin files) as a Hugging Face directory at ``dst``.

    Raises BadCheckpoint or UnsupportedModel, and leaves nothing at ``dst`` then; an existing ``dst`` is an error.
    """
    src, dst = Path(src), Path(dst)
    if dst.exists():
        raise EngineError(f"{dst} exists already; convert writes a new directory")
    building = dst.with_name(f".{dst.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        if src.suffix == ".gguf":
            _convert_gguf(src, building)
        elif src.is_dir():
            _convert_pickles(src, building)
        else:
            raise BadCheckpoint(f"{src} is neither a .gguf file nor a directory with .bin weights")
        building.rename(dst)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return dst


def _convert_gguf(src: Path, dst: Path) -> None:
    model = GGUFModel(src)
    _write_json(dst / "config.json", model.config())
    _write_json(dst / "generation_config.json", model.generation_config())
    model.write_tokenizer(dst)
    _write_shards(dst, _split(model.tensors()))


def _convert_pickles(src: Path, dst: Path) -> None:
    files = sorted(src.glob("pytorch_model*.bin"))  # beside them, a trainer leaves other pickles
    if not files and any(src.glob("*.safetensors")):
        raise BadCheckpoint(f"{src} holds safetensors already: there is nothing to convert, use it as it is")
    files = files or sorted(src.glob("*.bin"))
    if not files:
        raise BadCheckpoint(f"{src} holds no .bin weights")
    for path in src.iterdir():
        if path.suffix in {".json", ".model", ".txt", ".jinja"} and not path.name.endswith(".bin.index.json"):
            shutil.copy(path, dst)
    if not (dst / "config.json").exists():
        raise BadCheckpoint(f"{src} holds no config.json")
    tied = read_json(dst / "config.json").get("tie_word_embeddings", False)
    _write_shards(dst, (_load_pickle(path, skip={"lm_head.weight"} if tied else set()) for path in files))


def _load_pickle(path: Path, skip: set[str]) -> Shard:
    """The tensors of one torch.save file. Only tensors are unpickled: other objects could run code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise BadCheckpoint(f"{path.name} is not a plain file of tensors; refused") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadCheckpoint(f"{path.name} holds something other than named tensors; refused")
    # Clones part tensors that share memory, which safetensors does not store.
    return [(name, value.contiguous().clone()) for name, value in state.items() if name not in skip]


def _split(tensors: Shard) -> Iterator[Shard]:
    """Group tensors into shards of at most SHARD_BYTES (or one tensor), so that memory stays bounded."""
    shard: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += tensor.nbytes
    yield shard


def _write_shards(dst: Path, shards: Iterable[Shard]) -> None:
    """One model.safetensors, or numbered shards and their index, as Transformers names them."""
    written: list[tuple[Path, list[str]]] = []
    total = 0
    for number, shard in enumerate(shards):
        tensors = dict(shard)
        path = dst / f"shard-{number}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        written.append((path, list(tensors)))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(written) == 1:
        written[0][0].rename(dst / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written, 1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(dst / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(dst / "model.safetensors.index.json", index)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
