"""Interactive jobs over a saturating bulk backlog: how long they wait, and what that costs in throughput against FIFO.

    python bench/tiers.py --model qwen3-0.6b --out bench/results/tiers.json

The worker's own admission feeds an engine with random weights. ``--scarce slots`` runs it out of slots, ``blocks`` out of
KV blocks. The same jobs, arriving at the same times, go through it in turns under tiers and under FIFO; ``alone`` are the
interactive ones without a backlog; ``contended`` has both tiers saturated and shows what is left for bulk.

A wait is counted from the moment a job arrives, in the middle of a step most of the time, to the moment it is seated, in
milliseconds and in steps begun: 1 is the very next one. Only jobs that arrive while bulk jobs wait count. Imports the
engine, torch, numpy and admission alone, so it runs where there is no Kafka and no Postgres.
"""

import argparse
import gc
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import results_file
import torch
import workloads
from random_model import SHAPES, random_engine

from headrace.engine import Engine, Request, SamplingParams
from headrace.engine.priorities import Priority
from headrace.worker.admission import Admission
from headrace.worker.tiers import Tier, default_tiers

TIERS = default_tiers(("interactive", "bulk"))


@dataclass(eq=False, slots=True)
class Job:
    """A job as admission sees it, and the times of its life: seconds since the run began, ``seated`` and later from the engine."""

    tier: str
    prompt: list[int]
    out: int
    arrives: float = 0.0
    tenant: str = "default"
    deadline_s: float | None = None
    waiting: bool = True
    added: float = 0.0
    seated: float = 0.0
    first_token: float = 0.0

    @property
    def cost(self) -> int:
        return len(self.prompt) + self.out


class Feed(Protocol):
    """What decides which job the engine gets next."""

    def put(self, job: Job, now: float) -> None: ...

    def take(self, now: float) -> list[tuple[Job, int]]:
        """Jobs to start, each with its priority."""

    def release(self, job: Job) -> None: ...

    def waiting(self, tier: str) -> int: ...


class Fifo:
    """First come, first served, as many in flight as there are places."""

    def __init__(self, places: int) -> None:
        self._free, self._queue = places, deque[Job]()

    def put(self, job: Job, now: float) -> None:
        self._queue.append(job)

    def take(self, now: float) -> list[tuple[Job, int]]:
        taken = [(self._queue.popleft(), 0) for _ in range(min(self._free, len(self._queue)))]
        self._free -= len(taken)
        return taken

    def release(self, job: Job) -> None:
        self._free += 1

    def waiting(self, tier: str) -> int:
        return sum(job.tier == tier for job in self._queue)


class Tiered:
    """The worker's admission."""

    def __init__(self, tiers: Iterable[Tier], places: int) -> None:
        self._admission: Admission[Job] = Admission(tuple(tiers), places)

    def put(self, job: Job, now: float) -> None:
        self._admission.put(job, now)

    def take(self, now: float) -> list[tuple[Job, int]]:
        return [(job, self._admission.rank(job)) for job in self._admission.take(now)]

    def release(self, job: Job) -> None:
        self._admission.release(job)

    def waiting(self, tier: str) -> int:
        return self._admission.waiting()[tier]


class Run:
    """One pass of jobs through the engine."""

    def __init__(self, engine: Engine, feed: Feed, jobs: list[Job], tag: str) -> None:
        self.engine, self.feed, self.tag = engine, feed, tag
        self.arrivals = deque(sorted(jobs, key=lambda job: job.arrives))
        self.running: dict[str, Job] = {}
        self.ended: list[Job] = []
        self.started_cost: dict[str, int] = dict.fromkeys((tier.name for tier in TIERS), 0)
        self.step_starts: list[float] = []
        self.begin = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self.begin

    def turn(self) -> None:
        """Take in what has arrived, start what admission chooses, step once."""
        while self.arrivals and self.arrivals[0].arrives <= self.now:
            job = self.arrivals.popleft()
            self.feed.put(job, self.now)
        if started := self.feed.take(self.now):
            self.engine.add_many([self._request(job, priority) for job, priority in started])
        if not self.engine.has_work:
            time.sleep(max(0.0, min(0.001, self.arrivals[0].arrives - self.now)))
            return
        self.step_starts.append(self.now)
        for done in self.engine.step().completions:
            job = self.running.pop(done.id)
            assert len(done.token_ids) == job.out, "an output has the wrong length"
            job.seated, job.first_token = job.added + done.queued_s, job.added + done.first_token_s
            self.feed.release(job)
            self.ended.append(job)

    def _request(self, job: Job, priority: int) -> Request:
        number = len(self.ended) + len(self.running)
        name = f"{self.tag}-{number}"
        self.running[name] = job
        job.added = self.now
        self.started_cost[job.tier] += job.cost
        sampling = SamplingParams(temperature=1.0, max_tokens=job.out, ignore_eos=True, seed=number)
        return Request(name, job.prompt, sampling, priority=priority, salt=self.tag)

    def steps(self, since: float, until: float) -> int:
        """Steps that began after ``since`` and not after ``until``."""
        return bisect_right(self.step_starts, until) - bisect_right(self.step_starts, since)


def pass_of(engine: Engine, feed: Feed, jobs: list[Job], tag: str) -> dict[str, Any]:
    """All jobs through the engine: the row of one pass."""
    gc.collect()
    gc.freeze()
    gc.disable()
    before, run = engine.stats(), Run(engine, feed, jobs, tag)
    saturated_s, saturated_tokens = 0.0, 0
    saturated = True
    while run.arrivals or run.running:
        run.turn()
        if saturated and len(run.step_starts) % 16 == 0:
            stats = engine.stats()
            saturated_tokens = _tokens(stats) - _tokens(before)
            saturated_s = run.now
            saturated = bool(stats.waiting or feed.waiting("bulk"))
    seconds = run.now
    gc.enable()
    gc.unfreeze()
    engine.check()
    after = engine.stats()
    interactive = [job for job in run.ended if job.tier == "interactive"]
    met = [job for job in interactive if job.arrives < saturated_s] or interactive
    bulk_tokens = sum(job.cost for job in run.ended if job.tier == "bulk")
    return {
        "interactive": len(met),
        **_percentiles("wait_ms", [1e3 * (job.seated - job.arrives) for job in met]),
        **_percentiles("wait_steps", [run.steps(job.arrives, job.seated) for job in met]),
        **_percentiles("ttft_ms", [1e3 * (job.first_token - job.arrives) for job in met]),
        **_percentiles("ttft_steps", [run.steps(job.arrives, job.first_token) for job in met]),
        "bulk_share": bulk_tokens / sum(job.cost for job in run.ended),
        "seconds": seconds,
        "tokens_per_s": (_tokens(after) - _tokens(before)) / seconds,
        "saturated_s": saturated_s,
        "saturated_tokens_per_s": saturated_tokens / max(saturated_s, 1e-9),
        "steps": len(run.step_starts),
        "preemptions": after.preemptions - before.preemptions,
    }


def contended(engine: Engine, feed: Feed, jobs: list[Job], places: int, tag: str) -> float:
    """Bulk's share of the tokens started while both tiers wait, from when the first jobs have made way for others."""
    run = Run(engine, feed, jobs, tag)
    while len(run.ended) < places:
        run.turn()
    filled = dict(run.started_cost)
    while len(run.ended) < 4 * places and all(feed.waiting(tier) for tier in filled):
        run.turn()
    for name in run.running:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    started = {tier: run.started_cost[tier] - filled[tier] for tier in filled}
    return started["bulk"] / sum(started.values())


def _tokens(stats: Any) -> int:
    return stats.prompt_tokens + stats.generated_tokens


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} if values else {}


def bulk_jobs(count: int, longest: int) -> list[Job]:
    """Jobs of the chat workload, cut to lengths that leave no long tail."""
    work: list[tuple[list[int], int]] = []
    while len(work) < count:
        work += workloads.build("chat", seed=len(work) // 2000)
    return [Job("bulk", prompt[:longest], min(out, longest // 2)) for prompt, out in work[:count]]


def interactive_jobs(rate: float, seconds: float, longest: int) -> list[Job]:
    """Poisson arrivals; prompts as the chat workload's, answers of 16 to 64 tokens."""
    rng = np.random.default_rng(1)
    prompts = [prompt[:longest] for prompt, _ in workloads.build("chat", seed=99)]
    jobs, at = [], 0.2  # the first finds the engine full
    while (at := at + rng.exponential(1 / rate)) < seconds:
        out = min(int(rng.integers(16, 65)), longest // 2)
        jobs.append(Job("interactive", prompts[len(jobs) % len(prompts)], out, arrives=at))
    return jobs


def fresh(jobs: list[Job]) -> list[Job]:
    """The same jobs for another pass."""
    return [Job(job.tier, job.prompt, job.out, job.arrives) for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--scarce", default="slots,blocks", help="what the engine runs out of; comma separated"
    )
    parser.add_argument("--slots", type=int, default=256, help="sequences at once where slots are scarce")
    parser.add_argument(
        "--kv-tokens", type=int, default=60_000, help="of the KV cache where blocks are scarce"
    )
    parser.add_argument(
        "--places", type=int, default=320, help="jobs in the engine at once, waiting ones included"
    )
    parser.add_argument("--bulk", type=int, default=1500, help="bulk jobs, all there at the start")
    parser.add_argument("--rate", type=float, default=40.0, help="interactive jobs a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which interactive jobs arrive")
    parser.add_argument(
        "--longest", type=int, default=512, help="tokens of the longest prompt; an answer is half of it"
    )
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    args = parser.parse_args()
    asked = {name: value for name, value in vars(args).items() if name not in ("out", "commit")}
    results = results_file.ResultsFile(args.out, args.commit, device=args.device, options=asked)
    bulk = bulk_jobs(args.bulk, args.longest)
    interactive = interactive_jobs(args.rate, args.seconds, args.longest)
    rows: list[dict[str, Any]] = []
    for scarce in args.scarce.split(","):
        rows += rows_of(scarce, bulk, interactive, args)
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    results.append(rows)


def rows_of(
    scarce: str, bulk: list[Job], interactive: list[Job], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every pass over one engine, tiers and FIFO in turns."""
    size = {"max_slots": args.slots} if scarce == "slots" else {"kv_tokens": args.kv_tokens}
    priorities = tuple(
        Priority(reserve=tier.reserve, preempts=tier.preempts, max_preemptions=tier.max_preemptions)
        for tier in TIERS
    )
    engine, _, ready = random_engine(args.model, device=args.device, priorities=priorities, **size)
    print(f"{args.model}, scarce {scarce}: ready in {ready:.1f} s", flush=True)
    names = {"model": args.model, "scarce": scarce}
    pass_of(engine, Fifo(args.places), fresh(bulk[: args.places // 4]), f"{scarce}-warm")
    rows = [
        names | {"feed": "alone"} | pass_of(engine, Fifo(args.places), fresh(interactive), f"{scarce}-alone")
    ]
    for rep in range(args.reps):
        for name in ("tiers", "fifo") if rep % 2 == 0 else ("fifo", "tiers"):
            feed = Tiered(TIERS, args.places) if name == "tiers" else Fifo(args.places)
            row = pass_of(engine, feed, fresh(bulk + interactive), f"{scarce}-{name}-{rep}")
            rows.append(names | {"feed": name, "rep": rep} | row)
    flood = [Job("interactive", job.prompt, job.out) for job in bulk]
    share = contended(
        engine, Tiered(TIERS, args.places), [*flood, *fresh(bulk)], args.places, f"{scarce}-contended"
    )
    rows.append(names | {"feed": "contended", "bulk_share": share})
    engine.close()
    show(rows)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The waits, each pass a line; then what tiers cost."""
    for what in ("wait_ms", "wait_steps", "ttft_ms", "ttft_steps"):
        results_file.table(
            [
                {"scarce": row["scarce"], "feed": row["feed"], "jobs": row["interactive"], "": what}
                | {f"p{q}": row[f"{what}_p{q}"] for q in (50, 95, 99)}
                for row in rows
                if "wait_ms_p50" in row
            ]
        )
    passes = [row for row in rows if row["feed"] in ("tiers", "fifo")]
    columns = (
        "feed", "bulk_share", "seconds", "tokens_per_s", "saturated_s", "saturated_tokens_per_s", "steps", "preemptions",
    )  # fmt: skip
    results_file.table([{name: row[name] for name in columns} for row in passes])
    for what in ("tokens_per_s", "saturated_tokens_per_s"):
        tiers, fifo = (
            statistics.median(row[what] for row in passes if row["feed"] == feed)
            for feed in ("tiers", "fifo")
        )
        print(f"{what}: tiers {tiers:,.0f}, fifo {fifo:,.0f}: {100 * (tiers / fifo - 1):+.1f}%")
    print(f"bulk's share with both tiers saturated: {rows[-1]['bulk_share']:.3f}", flush=True)


if __name__ == "__main__":
    main()
