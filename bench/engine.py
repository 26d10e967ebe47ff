"""The engine alone on offline workloads: random weights, token ids in, forced output lengths, all requests at the start.

    python bench/engine.py --model qwen3-0.6b --workload chat,decode --reps 2

Runs on one CUDA device, or with --device cpu --model tiny --limit 8 to see that it works. Rows are kept as they come, in
bench/results where --out names no file; those of the CPU only where it does. Imports torch, triton,
transformers, numpy and the engine alone; see floor.py for the floor. Of a row's figures, these four tell the host's part:

    host_ms_per_step         time outside waits for tokens, a launch that blocks included
    cpu_ms_per_step          the thread's processor time in that: what is left of host_ms is blocked, or given to others
    launch_ms_per_step       from a step's submission to its last launch; eager_launch_ms: of steps without a graph alone
    between_steps_share      share of the time in which no step had begun on the device. Gaps between the launches within a
                             step are not in it

What the device does is seen in an untimed pass after the first repetition, in which some steps are traced at times:

    gpu_idle_share           share of their time, from the first kernel to the last one's end, in which neither a kernel nor a
                             copy ran. Tracing slows launches down, so that it is too high where the device waits for those
"""

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path

import numpy as np
import results_file
import torch
import workloads
from floor import floor_seconds
from random_model import random_engine, requests_of, shape_of

from headrace.engine import Engine, EngineConfig
from headrace.engine.build import Parts

WINDOW_STEPS = 8
"""Steps that are traced at a time for the idle share."""


class MeasuredExecutor:
    """Passes plans on and adds up the time, and the thread's processor time, in waits for tokens."""

    def __init__(self, executor) -> None:
        self.inner = executor
        self.waited = self.waited_cpu = 0.0
        self.steps = 0

    def submit(self, plan):
        self.steps += 1
        handle = self.inner.submit(plan)
        return _MeasuredHandle(handle, self)


class _MeasuredHandle:
    """A step's handle whose tokens are waited for by the clock."""

    def __init__(self, handle, owner) -> None:
        self.handle, self.owner = handle, owner

    def tokens(self):
        start, cpu_start = time.perf_counter(), time.thread_time()
        tokens = self.handle.tokens()
        self.owner.waited += time.perf_counter() - start
        self.owner.waited_cpu += time.thread_time() - cpu_start
        return tokens

    def __getattr__(self, name):
        return getattr(self.handle, name)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(engine: Engine, parts: Parts, measured: MeasuredExecutor, work: list, tag: str) -> dict:
    """One repetition: seconds from the first add to the last completion, and what the steps looked like."""
    requests = requests_of(work, tag)
    executor, graphs = parts.executor, parts.executor.graphs
    executor.timings, measured.waited, measured.waited_cpu, measured.steps = [], 0.0, 0.0, 0
    replays = graphs.replays if graphs else 0
    before, used, generated = engine.stats(), [], 0
    synchronize()
    gc.collect()
    gc.freeze()
    start, cpu_start = time.perf_counter(), time.thread_time()
    engine.add_many(requests)
    while engine.has_work:
        for completion in engine.step().completions:
            generated += len(completion.token_ids)
        if measured.steps % 64 == 0:
            stats = engine.stats()
            used.append(
                (stats.blocks_live * stats.block_size - stats.wasted_tokens)
                / (stats.blocks_total * stats.block_size)
            )
    seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
    synchronize()
    timings, after = executor.timings, engine.stats()
    engine.check()
    assert generated == sum(out for _, out in work), "an output has the wrong length"
    busy, last = 0.0, 0.0
    for timing in timings:
        begin, end = (timings[0].begin.elapsed_time(event) for event in (timing.begin, timing.end))
        busy += end - max(begin, last)
        last = end
    steps = measured.steps
    return {
        "seconds": seconds,
        "steps": steps,
        "host_ms_per_step": 1e3 * (seconds - measured.waited) / steps,
        "cpu_ms_per_step": 1e3 * (cpu_seconds - measured.waited_cpu) / steps,
        "launch_ms_per_step": mean_launch_ms(timings),
        "eager_launch_ms": mean_launch_ms([timing for timing in timings if not timing.graph]),
        "between_steps_share": 1 - busy / 1e3 / seconds if timings else None,
        "graph_hits": (graphs.replays - replays) / steps if graphs else 0.0,
        "prefix_hit_rate": (after.prefix_hits - before.prefix_hits) / max(after.prefix_queries - before.prefix_queries, 1),
        "preemptions": after.preemptions - before.preemptions,
        "kv_utilisation": float(np.mean(used or [0.0])),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def mean_launch_ms(timings: list) -> float:
    """From submission to the last launch, on average; 0 where there are no such steps."""
    return 1e3 * sum(timing.launched_at - timing.submitted_at for timing in timings) / max(len(timings), 1)


def idle_share(engine: Engine, parts: Parts, work: list, steps: int, windows: int) -> float | None:
    """GPU idle share over at most so many windows, spread over the steps that the workload takes. None of no window."""
    parts.executor.timings = None
    requests = requests_of(work, "idle")
    engine.add_many(requests)
    gc.collect()
    gc.freeze()
    gc.disable()  # what was traced is a lot to look through, and the device would wait for that
    profiles, done = [], 0
    for start in window_starts(steps, windows):
        advance(engine, start - done)
        synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            advance(engine, WINDOW_STEPS)
            synchronize()
        profiles.append(profile)
        done = start + WINDOW_STEPS
    gc.enable()
    drop(engine, requests)
    found = [gaps(spans_of(profile)) for profile in profiles]
    idle, whole = (sum(times) for times in zip((0.0, 0.0), *found, strict=True))
    return idle / whole if whole else None


def window_starts(steps: int, windows: int) -> list[int]:
    """The first steps of windows in the middles of equal parts of so many steps: of fewer windows where they would meet."""
    windows = min(windows, steps // (2 * WINDOW_STEPS))
    return [(2 * window + 1) * steps // (2 * windows) - WINDOW_STEPS // 2 for window in range(windows)]


def spans_of(profile: torch.profiler.profile) -> list[tuple[float, float]]:
    """When kernels and copies ran, in microseconds, from the third step on: the first finds an empty queue, and what is
    traced for the first time takes longer."""
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    steps = [begins for begins, _, name in events if name.startswith("_step_inputs")]
    return [(begins, ends) for begins, ends, _ in events if steps[2:] and begins >= steps[2]]


def gaps(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """What no span covers between the first one's begin and the last one's end, and all of that time. Spans come by begin."""
    if not spans:
        return 0.0, 0.0
    idle, end = 0.0, spans[0][1]
    for begins, ends in spans:
        idle, end = idle + max(begins - end, 0.0), max(end, ends)
    return idle, end - spans[0][0]


def advance(engine: Engine, steps: int) -> None:
    """So many steps, or until nothing is left to do."""
    for _ in range(steps):
        if engine.has_work:
            engine.step()


def drop(engine: Engine, requests: list) -> None:
    """End what is left of the requests."""
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


def trace(engine: Engine, parts: Parts, work: list, path: Path, first: int, count: int) -> None:
    """A Chrome trace of ``count`` steps after the first ``first`` of a workload."""
    parts.executor.timings = None
    requests = requests_of(work, "trace")
    engine.add_many(requests)
    advance(engine, first)
    synchronize()
    with torch.profiler.profile() as profile:  # of the GPU too, where there is one
        advance(engine, count)
        synchronize()
    profile.export_chrome_trace(str(path))
    order = "cuda_time_total" if parts.executor.runner.device.type == "cuda" else "cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=18, max_name_column_width=60))
    drop(engine, requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        required=True,
        help="names of random_model.SHAPES, directories with config.json, or such files; comma separated",
    )
    parser.add_argument(
        "--workload", required=True, help="chat, chat_shared, extract, longdoc, decode; comma separated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workloads")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument(
        "--out",
        type=Path,
        help="append rows to this JSON file; default: bench/results/engine-DEVICE.json with the GPU's name, as in"
        " engine-nvidia-h200.json, and none with --device cpu",
    )
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    parser.add_argument(
        "--trace",
        type=Path,
        help="write a Chrome trace of some steps of each workload to PATH.MODEL.WORKLOAD.json.gz",
    )
    parser.add_argument("--trace-at", type=int, default=100, help="steps before the trace begins")
    parser.add_argument(
        "--idle-windows",
        type=int,
        default=8,
        help="times that steps are traced in a pass of their own for the GPU idle share; 0: no such pass",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--max-slots", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--limit", type=int, help="only the first requests of each workload")
    args = parser.parse_args()
    options = {
        "cuda_graphs": not args.no_graphs, "batch_invariant": args.batch_invariant,
        "lag": args.lag, "max_slots": args.max_slots, "max_batched_tokens": args.max_batched_tokens,
    }  # fmt: skip
    out = args.out or default_out(args.device)
    asked = options | {"seed": args.seed, "limit": args.limit}
    results = results_file.ResultsFile(out, args.commit, device=args.device, options=asked)
    rows, on_cuda = [], args.device != "cpu" and torch.cuda.is_available()
    for given in args.model.split(","):
        model, shape = shape_of(given)
        engine, parts, ready = random_engine(given, device=args.device, **options)
        measured = MeasuredExecutor(parts.executor)
        engine = Engine(EngineConfig(model=model), dataclasses.replace(parts, executor=measured))
        print(f"{model}: ready in {ready:.1f} s, {engine.stats().blocks_total * 32:,} KV tokens", flush=True)
        warm = [(list(range(10, 300 + 7 * i)), 8) for i in range(4)]
        run(engine, parts, measured, warm, "warm")
        for name in args.workload.split(","):
            work = workloads.build(name, args.seed)[: args.limit]
            if args.trace:
                trace(
                    engine, parts, work, args.trace.with_suffix(f".{model}.{name}.json.gz"), args.trace_at, 12
                )
            idle = None
            for rep in range(args.reps):
                row = {"model": model, "workload": name, "rep": rep, "ready_s": ready}
                row |= run(engine, parts, measured, work, f"{name}-{rep}")
                if on_cuda and args.idle_windows and idle is None:
                    idle = idle_share(engine, parts, work, row["steps"], args.idle_windows)
                row["gpu_idle_share"] = idle
                floor = floor_seconds(shape, work)
                tokens_in, tokens_out = sum(len(p) for p, _ in work), sum(o for _, o in work)
                row |= {
                    "output_tokens_per_s": tokens_out / row["seconds"],
                    "total_tokens_per_s": (tokens_in + tokens_out) / row["seconds"],
                    "floor_s": floor, "share_of_floor": floor / row["seconds"],
                }  # fmt: skip
                rows.append(row)
                results.append([row])
                print(
                    json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                    flush=True,
                )
        engine.close()
        del engine, parts, measured
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print_table(rows)
    if out:
        print(f"these rows are in {out}")


def default_out(device: str) -> Path | None:
    """Where a GPU's rows go that nobody named a file for; None for the CPU's."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    name = "-".join(results_file.device_name(device).lower().split())
    return Path(__file__).parent / "results" / f"engine-{name}.json"


def print_table(rows: list[dict]) -> None:
    columns = {
        "model": "model", "workload": "workload", "seconds": "s", "output_tokens_per_s": "out/s", "total_tokens_per_s": "tok/s",
        "share_of_floor": "floor", "host_ms_per_step": "host ms", "cpu_ms_per_step": "cpu ms", "launch_ms_per_step": "launch ms",
        "eager_launch_ms": "eager ms", "between_steps_share": "between", "gpu_idle_share": "idle", "graph_hits": "graphs", "prefix_hit_rate": "hits",
        "kv_utilisation": "kv", "peak_memory_gib": "GiB", "steps": "steps",
    }  # fmt: skip
    results_file.table([{title: row[key] for key, title in columns.items()} for row in rows])


if __name__ == "__main__":
    main()
