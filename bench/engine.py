"""The engine alone on offline workloads: random weights, token ids in, forced output lengths, all requests at the start.

    python bench/engine.py --model qwen3-0.6b --workload chat,decode --reps 2 --out bench/results/engine.json

Runs on one CUDA device. Imports torch, triton, transformers, numpy and the engine alone. The floor counts each bf16
operation at 790 TFLOP/s, the weights once a step and each KV byte once a decode step at 4.3 TB/s, added up.
"""

import argparse
import dataclasses
import gc
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import workloads

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.build import Parts, build

FLOPS_PER_S, BYTES_PER_S = 790e12, 4.3e12


class MeasuredExecutor:
    """Passes plans on and adds up the time that the host spends waiting for tokens."""

    def __init__(self, executor) -> None:
        self.inner = executor
        self.waited = 0.0

    def submit(self, plan):
        handle = self.inner.submit(plan)
        return _MeasuredHandle(handle, self)


class _MeasuredHandle:
    def __init__(self, handle, owner) -> None:
        self.handle, self.owner = handle, owner

    def tokens(self):
        start = time.perf_counter()
        tokens = self.handle.tokens()
        self.owner.waited += time.perf_counter() - start
        return tokens

    def logprobs(self):
        return self.handle.logprobs()


def floor_seconds(shape: dict, requests: list) -> float:
    """The hardware's floor for a workload on this shape; an estimate that adds compute and memory up.

    A prefix that prompts share is computed once, and read once a decode step, however many rows share it.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * shape["intermediate_size"]
    head = hidden * shape["vocab_size"]
    shared, unique = shared_prefixes([prompt for prompt, _ in requests])
    own = [len(prompt) - common for (prompt, _), common in zip(requests, shared, strict=True)]
    steps = max(out for _, out in requests)
    tokens_in = sum(own) + unique
    tokens_out = sum(out for _, out in requests)
    matmul = 2 * layers * layer * (tokens_in + tokens_out) + 2 * head * tokens_out
    attention = sum(
        4 * layers * q * (common + length / 2) * length for common, length in zip(shared, own, strict=True)
    )
    contexts = unique * steps + sum(
        length * out + out * out / 2 for length, (_, out) in zip(own, requests, strict=True)
    )
    kv_bytes = contexts * layers * 2 * kv * 2
    weight_bytes = 2 * (layers * layer + head) * steps
    return (matmul + attention) / FLOPS_PER_S + (kv_bytes + weight_bytes) / BYTES_PER_S


def shared_prefixes(prompts: list, block: int = 32) -> tuple[list[int], int]:
    """How many first tokens each prompt shares with another one, in whole blocks, and how many such tokens there are."""
    chains = []
    count: dict[int, int] = {}
    for prompt in prompts:
        chain, chains_so_far = 0, []
        for start in range(0, len(prompt) - len(prompt) % block, block):
            chain = hash((chain, tuple(prompt[start : start + block])))
            count[chain] = count.get(chain, 0) + 1
            chains_so_far.append(chain)
        chains.append(chains_so_far)
    shared = [block * sum(count[chain] > 1 for chain in chain_of) for chain_of in chains]
    return shared, block * sum(many > 1 for many in count.values())


def requests_of(work: list, tag: str) -> list[Request]:
    """The tag is a salt too: an engine keeps its prefix cache, and each repetition must find it empty."""
    return [
        Request(
            f"{tag}-{i}",
            prompt,
            SamplingParams(temperature=1.0, max_tokens=out, ignore_eos=True, seed=i),
            salt=tag,
        )
        for i, (prompt, out) in enumerate(work)
    ]


def run(
    engine: Engine, parts: Parts, measured: MeasuredExecutor, work: list, tag: str, window: int | None
) -> dict:
    """One repetition: seconds from the first add to the last completion, and what the steps looked like."""
    requests = requests_of(work, tag)
    executor, graphs = parts.executor, parts.executor.graphs
    executor.timings, measured.waited = [], 0.0
    replays = graphs.replays if graphs else 0
    before, used, generated = engine.stats(), [], 0
    torch.cuda.synchronize()
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    pending = list(reversed(requests))
    waiting = 0
    while pending or engine.has_work:
        if pending and (window is None or waiting < window):
            batch = [pending.pop() for _ in range(len(pending) if window is None else min(64, len(pending)))]
            engine.add_many(batch)
            waiting = engine.stats().waiting
        for completion in engine.step().completions:
            generated += len(completion.token_ids)
        if window is not None:
            waiting = engine.stats().waiting
        if len(executor.timings) % 64 == 0:
            stats = engine.stats()
            used.append(
                (stats.blocks_live * stats.block_size - stats.wasted_tokens)
                / (stats.blocks_total * stats.block_size)
            )
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    timings, after = executor.timings, engine.stats()
    engine.check()
    assert generated == sum(out for _, out in work), "an output has the wrong length"
    busy, last = 0.0, 0.0
    for timing in timings:
        begin, end = (timings[0].begin.elapsed_time(event) for event in (timing.begin, timing.end))
        busy += end - max(begin, last)
        last = end
    steps = len(timings)
    return {
        "seconds": seconds,
        "steps": steps,
        "cpu_ms_per_step": 1e3 * (seconds - measured.waited) / steps,
        "gpu_idle_share": 1 - busy / 1e3 / seconds,
        "graph_hits": (graphs.replays - replays) / steps if graphs else 0.0,
        "prefix_hit_rate": (after.prefix_hits - before.prefix_hits) / max(after.prefix_queries - before.prefix_queries, 1),
        "preemptions": after.preemptions - before.preemptions,
        "kv_utilisation": float(np.mean(used)),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def build_engine(name: str, options: dict) -> tuple[Engine, Parts, MeasuredExecutor, float]:
    """An engine for a shape of workloads.MODELS, and the seconds that it took to be ready."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(workloads.MODELS[name]))
        start = time.perf_counter()
        config = EngineConfig(model=folder, weights="random", device="cuda", **options)
        parts = build(config)
        measured = MeasuredExecutor(parts.executor)
        engine = Engine(config, dataclasses.replace(parts, executor=measured))
        return engine, parts, measured, time.perf_counter() - start


def trace(engine: Engine, parts: Parts, work: list, path: Path, first: int, count: int) -> None:
    """A Chrome trace of ``count`` steps after the first ``first`` of a workload."""
    parts.executor.timings = None
    requests = requests_of(work, "trace")
    engine.add_many(requests)
    for _ in range(first):
        engine.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="names of workloads.MODELS, comma separated")
    parser.add_argument("--workload", required=True, help="chat, extract, longdoc, decode; comma separated")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of some steps of each workload here")
    parser.add_argument("--trace-at", type=int, default=100, help="steps before the trace begins")
    parser.add_argument(
        "--window", type=int, help="feed requests so that about this many wait, instead of all at once"
    )
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--max-slots", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--limit", type=int, help="only the first requests of each workload")
    args = parser.parse_args()
    options = {
        "cuda_graphs": not args.no_graphs, "lag": args.lag, "max_slots": args.max_slots,
        "max_batched_tokens": args.max_batched_tokens,
    }  # fmt: skip
    rows = []
    for model in args.model.split(","):
        engine, parts, measured, ready = build_engine(model, options)
        print(f"{model}: ready in {ready:.1f} s, {engine.stats().blocks_total * 32:,} KV tokens", flush=True)
        warm = [(list(range(10, 300 + 7 * i)), 8) for i in range(4)]
        run(engine, parts, measured, warm, "warm", None)
        for name in args.workload.split(","):
            work = workloads.build(name)[: args.limit]
            if args.trace:
                trace(engine, parts, work, args.trace.with_suffix(f".{model}.{name}.json"), args.trace_at, 12)
            for rep in range(args.reps):
                row = {"model": model, "workload": name, "rep": rep, "ready_s": ready}
                row |= run(engine, parts, measured, work, f"{name}-{rep}", args.window)
                floor = floor_seconds(workloads.MODELS[model], work)
                tokens_in, tokens_out = sum(len(p) for p, _ in work), sum(o for _, o in work)
                row |= {
                    "output_tokens_per_s": tokens_out / row["seconds"],
                    "total_tokens_per_s": (tokens_in + tokens_out) / row["seconds"],
                    "floor_s": floor, "share_of_floor": floor / row["seconds"],
                }  # fmt: skip
                rows.append(row)
                print(
                    json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                    flush=True,
                )
        engine.close()
        del engine, parts, measured
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print_table(rows)
    if args.out:
        write(args.out, rows, vars(args))


def print_table(rows: list[dict]) -> None:
    columns = [
        ("seconds", "s"), ("output_tokens_per_s", "out/s"), ("total_tokens_per_s", "tok/s"), ("share_of_floor", "floor"),
        ("cpu_ms_per_step", "cpu ms"), ("gpu_idle_share", "idle"), ("graph_hits", "graphs"), ("prefix_hit_rate", "hits"),
        ("kv_utilisation", "kv"), ("peak_memory_gib", "GiB"), ("steps", "steps"),
    ]  # fmt: skip
    print(f"{'model':<12}{'workload':<10}" + "".join(f"{title:>10}" for _, title in columns))
    for row in rows:
        print(
            f"{row['model']:<12}{row['workload']:<10}" + "".join(f"{row[key]:>10.6g}" for key, _ in columns)
        )


def write(path: Path, rows: list[dict], arguments: dict) -> None:
    """Append to the results' JSON: conditions first, then the rows."""
    import triton

    content = {
        "device": torch.cuda.get_device_name(), "commit": arguments.pop("commit") or _commit(), "torch": torch.__version__,
        "triton": triton.__version__, "arguments": {k: str(v) for k, v in arguments.items() if v is not None}, "rows": [],
    }  # fmt: skip
    if path.exists():
        content = json.loads(path.read_text())
    content["rows"] += rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _commit() -> str:
    """This checkout's commit, marked where the tree differs from it."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True
    )
    return git.stdout.strip() if git.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
