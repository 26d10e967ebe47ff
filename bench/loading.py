"""How soon a worker can answer: from process start to the first token, and real weights in GB/s.

    python bench/loading.py ready --model llama3-8b --runs cold,warm --out bench/results/ready.json
    python bench/loading.py weights --model llama3-8b --layers 4 --out bench/results/loading.json

``ready`` starts a process of its own for each run and stops the clock at its first token: interpreter, imports, weights
made on the card, memory profiled, every graph captured, one prompt of 16 tokens. ``cold`` gives it an empty folder for
Triton's compiled kernels, ``warm`` the folder that the run before it filled.

``weights`` writes a checkpoint of random values (the shape with fewer layers), and loads it through the engine's own
loader: from the page cache, and with the files dropped from it first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def first_token(model: str, device: str) -> None:
    """Run in a process of its own: print as JSON when (seconds since the epoch) each stage was over."""
    began = time.time()
    from random_model import random_engine, requests_of

    imported = time.time()
    engine, _, _ = random_engine(model, device=device)
    built = time.time()
    engine.add_many(requests_of([(list(range(10, 26)), 1)], "first"))
    while engine.has_work:
        engine.step()
    print(json.dumps({"began": began, "imported": imported, "built": built, "answered": time.time()}))


def time_to_first_token(model: str, device: str, kernels: Path) -> dict[str, float]:
    """Seconds of one process, up to its first token, and of its stages."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "first-token", "--model", model, "--device", device],
        env=os.environ | {"TRITON_CACHE_DIR": str(kernels)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    at = json.loads(done.stdout.splitlines()[-1])
    return {
        "seconds": at["answered"] - started,
        "interpreter_s": at["began"] - started,
        "imports_s": at["imported"] - at["began"],
        "engine_s": at["built"] - at["imported"],
        "first_token_s": at["answered"] - at["built"],
    }


def ready(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder)
        for number, run in enumerate(args.runs.split(",")):
            if run == "cold":
                kernels = Path(folder) / str(number)
            seconds = time_to_first_token(args.model, args.device, kernels)
            rows.append({"model": args.model, "kernels": run, **seconds})
            print(rows[-1], flush=True)
    return rows


def write_checkpoint(shape: dict[str, Any], folder: Path, device: str) -> int:
    """Random weights as safetensors in shards, forced to the disk. Returns their bytes."""
    import torch
    from safetensors.torch import save_file

    from headrace.engine.models.config import ModelConfig
    from headrace.engine.models.decoder import build_model

    (folder / "config.json").write_text(json.dumps(shape))
    model = build_model(ModelConfig.from_directory(folder), device, torch.bfloat16)
    model.random_init(seed=0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in model.destinations():
        if sum(t.nbytes for t in shards[-1].values()) > 1 << 30:
            shards.append({})
        shards[-1][name] = tensor.cpu().clone()
    weight_map = {}
    for number, shard in enumerate(shards):
        path = folder / f"model-{number:05d}.safetensors"
        save_file(shard, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        weight_map |= dict.fromkeys(shard, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for shard in shards for tensor in shard.values())


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def weights(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from random_model import SHAPES

    from headrace.engine.models.config import ModelConfig
    from headrace.engine.models.decoder import build_model
    from headrace.engine.weights import iterate_safetensors, load_model

    on_card = args.device != "cpu"
    rows: list[dict[str, Any]] = []

    def measure(what: str, size: int, action: Callable[[], object]) -> None:
        if on_card:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        start = time.perf_counter()
        kept = action()
        if on_card:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del kept
        rows.append(
            {"model": args.model, "layers": args.layers, "what": what, "gb": size / 1e9, "seconds": seconds,
             "gb_per_s": size / 1e9 / seconds}
        )  # fmt: skip
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        shape = SHAPES[args.model] | {"num_hidden_layers": args.layers}
        size = write_checkpoint(shape, folder, args.device)
        config = ModelConfig.from_directory(folder)

        def load() -> object:
            return load_model(folder, args.device, torch.bfloat16)

        def load_by_device() -> object:
            model = build_model(config, args.device, torch.bfloat16)
            model.load(iterate_safetensors(folder, args.device))
            return model

        drop_from_page_cache(folder)
        measure("from disk", size, load)
        measure("from page cache", size, load)
        measure("from page cache, again", size, load)
        measure("from page cache, each tensor made on the device", size, load_by_device)
        pinned = torch.ones(1 << 28, dtype=torch.int32, pin_memory=on_card)
        measure("pinned copy (the link's ceiling)", pinned.nbytes, lambda: pinned.to(args.device, copy=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["ready", "weights", "first-token"])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument(
        "--runs", default="cold,warm", help="of ready: cold or warm, comma separated; cold first"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the checkpoint that weights writes")
    parser.add_argument(
        "--folder", type=Path, help="where weights writes it; default: the system's folder for such"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write rows to this JSON file, a new one")
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.out and args.out.exists():  # what a file holds is not compared here: that takes torch
        parser.error(f"--out: {args.out} is there already, and may be of other conditions; name another file")
    if args.what == "first-token":
        first_token(args.model, args.device)
        return
    rows = ready(args) if args.what == "ready" else weights(args)
    import results_file  # here, so that a run of ready starts from nothing that torch has warmed up

    results_file.ResultsFile(args.out, args.commit, device=args.device).append(rows)
    results_file.table(rows)


if __name__ == "__main__":
    main()
