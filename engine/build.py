"""Puts an engine together: model, memory, scheduler, executor."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError, OutOfMemory
from headrace.engine.executor import Executor, LocalExecutor
from headrace.engine.grammars import Grammars
from headrace.engine.graphs import GraphCache
from headrace.engine.hub import resolve
from headrace.engine.kv_cache import KVCache
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import Model, build_model
from headrace.engine.numerics import BATCH_INVARIANT, FAST, Numerics
from headrace.engine.priorities import Priorities
from headrace.engine.request import ModelInfo
from headrace.engine.runner import ModelRunner
from headrace.engine.scheduler import Scheduler
from headrace.engine.warmup import compile_kernels, peak_bytes, run_large_steps
from headrace.engine.weights import load_model

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
CPU_KV_TOKENS = 65_536
# A CPU is as quick with short steps, and a cancel or a stop is heard of between two of them.
CPU_SLOTS, CPU_BATCHED_TOKENS = 64, 256
CUDA_SLOTS, CUDA_BATCHED_TOKENS = 2048, 8192


@dataclass(frozen=True, slots=True)
class Parts:
    """What an Engine is made of; tests replace the executor. grammars: None for those of the model's own tokenizer."""

    info: ModelInfo
    scheduler: Scheduler
    executor: Executor
    lag: int
    grammars: Grammars | None = None


def build(config: EngineConfig) -> Parts:
    """Load the model, size the KV cache, make the rest fit."""
    path = resolve(config.model)
    device = find_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        return _build(config, path, device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{device} cannot hold {config.model} and its KV cache: {error}") from error


def _build(config: EngineConfig, path: Path, device: torch.device) -> Parts:
    dtype: torch.dtype = getattr(torch, config.dtype)
    on_cuda = device.type == "cuda"
    numerics = BATCH_INVARIANT if config.batch_invariant else FAST
    model = _model(config, path, device, dtype, numerics)
    max_slots = config.max_slots or (CUDA_SLOTS if on_cuda else CPU_SLOTS)
    budget = config.max_batched_tokens or (CUDA_BATCHED_TOKENS if on_cuda else CPU_BATCHED_TOKENS)
    num_blocks = _num_blocks(config, model, device, dtype, max_slots, budget)
    max_context = min(model.config.max_context, num_blocks * config.block_size)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_slots=max_slots,
        max_context=max_context,
        max_batched_tokens=budget,
        prefix_cache=config.prefix_cache,
        merge_prefixes=not config.batch_invariant,
        priorities=Priorities(config.priorities),
    )
    kv = KVCache(model.kv_specs(), num_blocks, config.block_size, dtype, device)
    runner = ModelRunner(model, kv, max_slots, max_context)
    graphs = None
    if on_cuda:
        compile_kernels(runner)
        graphs = GraphCache(runner) if config.cuda_graphs else None
    if graphs is not None:
        graphs.capture_all()
    if on_cuda:
        run_large_steps(runner, graphs.sizes if graphs else [max_slots], budget)
    info = ModelInfo(
        path=str(path),
        vocab_size=model.config.vocab_size,
        max_context=max_context,
        max_slots=max_slots,
        bos_id=model.config.bos_id,
        eos_ids=model.config.eos_ids,
        sampling=dict(model.config.sampling),
    )
    lag = config.lag if config.lag is not None else int(on_cuda)
    return Parts(info, scheduler, LocalExecutor(runner, graphs), lag)


def find_device(name: str) -> torch.device:
    """The device that ``name`` means on this machine. Raises EngineError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not DEVICE.fullmatch(name):
        raise EngineError(
            f"device {name!r} is none: it is cpu, cuda, cuda:N or auto (HEADRACE_DEVICE, --device)"
        )
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"device {name!r} was asked for, but torch finds no CUDA device; use 'cpu' or 'auto'"
        )
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise EngineError(
                f"device {name!r} was asked for, and the last is cuda:{torch.cuda.device_count() - 1}"
            )
        device = torch.device("cuda", device.index or 0)
    return device


def _model(
    config: EngineConfig, path: Path, device: torch.device, dtype: torch.dtype, numerics: Numerics
) -> Model:
    if config.weights == "checkpoint":
        return load_model(path, device, dtype, numerics, config.max_context)
    model = build_model(ModelConfig.from_directory(path, config.max_context), device, dtype, numerics)
    model.random_init(seed=0)
    return model


def _num_blocks(
    config: EngineConfig, model: Model, device: torch.device, dtype: torch.dtype, max_slots: int, budget: int
) -> int:
    """Blocks of the KV cache: as asked for, else what the device can hold beside weights, steps and graphs."""
    page = config.block_size * sum(spec.bytes_per_token(dtype) for spec in model.kv_specs())
    if config.kv_tokens is not None:
        blocks = config.kv_tokens // config.block_size
    elif device.type == "cpu":
        blocks = CPU_KV_TOKENS // config.block_size
    else:
        peak = peak_bytes(model, config.block_size, max_slots, budget)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        graphs = peak if config.cuda_graphs else 0
        blocks = int(free - (1 - config.memory_fraction) * total - peak - graphs) // page
    if blocks < 1:
        raise OutOfMemory(
            f"the KV cache needs at least one block of {config.block_size} tokens ({page / 2**20:.1f} MiB):"
            " raise memory_fraction"
        )
    return blocks
