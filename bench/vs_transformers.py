"""The engine against Transformers on the same card in the same run: padded ``generate``, and its continuous batching.

    python bench/vs_transformers.py --model qwen3-0.6b --limit 45 --out bench/results/vs_transformers.json

The chat workload: random weights, sampled at temperature 1, output lengths forced; only tokens that were asked for count.

``generate`` gets what no user has: output lengths known beforehand. Requests are sorted into classes of output length,
each class by prompt length, and cut into left-padded batches as large as fit. How many classes and batches are best is
found from a cost model of a step, whose two numbers are measured on the card first. Where all batches would take longer
than the limit, every k-th of them runs, in full, and the whole workload's seconds are estimated from the model.

Continuous batching gets each request's own length, and the fastest of several settings, tried on a few requests. It runs
on as many of the first requests as four times the limit allows: the longest of them alone takes a thousand steps, and with
fewer requests it would be measured mostly with an empty batch.

The engine then runs the very requests that either ran, and the whole workload.
"""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results_file
import torch
import transformers
import workloads
from random_model import SHAPES, config_directory, random_engine, seconds_for
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

Work = list[tuple[list[int], int]]

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
MEMORY_SHARE = 0.75
"""Of the free memory, for padded keys and values; prefill's activations and copies of a layer's cache take the rest."""


def transformers_model(name: str, device: str) -> Any:
    with config_directory(SHAPES[name]) as folder, torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**SAMPLED)
    model.config.eos_token_id = None
    return model.eval()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# -- generate, in padded batches --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Requests (indices into the workload) that ``generate`` takes at once, padded to the longest prompt and output."""

    rows: list[int]
    width: int
    steps: int

    @property
    def tokens(self) -> int:
        return len(self.rows) * (self.width + self.steps)


@dataclass(frozen=True)
class Cost:
    """Seconds of a decode step: ``step`` + ``token`` for each padded token in its cache; ``prefill`` for each prompt token."""

    step: float
    token: float
    prefill: float

    def of(self, batches: Sequence[Batch]) -> float:
        return sum(
            batch.steps * (self.step + self.token * len(batch.rows) * (batch.width + batch.steps / 2))
            + self.prefill * len(batch.rows) * batch.width
            for batch in batches
        )


def batches_of(work: Work, classes: int, parts: int, most_tokens: int) -> list[Batch]:
    """Cut by output length into ``classes``, each by prompt length into ``parts``, more where a batch would not fit."""
    order = sorted(range(len(work)), key=lambda i: -work[i][1])
    return [
        batch
        for some in _cut(order, classes)
        for part in _cut(sorted(some, key=lambda i: -len(work[i][0])), parts)
        for batch in _that_fit(work, part, most_tokens)
    ]


def _cut(items: list[int], pieces: int) -> Iterator[list[int]]:
    size = -(-len(items) // pieces)
    return (items[i : i + size] for i in range(0, len(items), size))


def _that_fit(work: Work, rows: list[int], most_tokens: int) -> list[Batch]:
    batch = Batch(rows, max(len(work[i][0]) for i in rows), max(work[i][1] for i in rows))
    if batch.tokens <= most_tokens or len(rows) == 1:
        return [batch]
    return [fitting for half in _cut(rows, 2) for fitting in _that_fit(work, half, most_tokens)]


def generate(model: Any, work: Work, batch: Batch, device: str) -> float:
    """Seconds of one padded batch. Raises OutOfMemoryError where it does not fit after all."""
    prompts = [work[i][0] for i in batch.rows]
    ids = torch.tensor([[0] * (batch.width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor(
        [[0] * (batch.width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
    )
    synchronize(device)
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=mask, max_new_tokens=batch.steps)
    synchronize(device)
    seconds = time.perf_counter() - start
    assert output.shape == (len(prompts), batch.width + batch.steps)
    return seconds


def measured_cost(model: Any, device: str, rows: int, width: int, steps: int = 12) -> Cost:
    """Two batches, a small and a large one, each for one step and for some."""

    def seconds(count: int, length: int) -> tuple[float, float]:
        work = [([7] * length, steps)] * count
        first, both = (
            generate(model, work, Batch(list(range(count)), length, s), device) for s in (1, steps + 1)
        )
        return first, max(both - first, 1e-9) / steps

    seconds(2, 16)
    _, small = seconds(4, 16)
    first, large = seconds(rows, width)
    in_cache = rows * (width + steps / 2)
    return Cost(small, max(large - small, 0) / in_cache, first / (rows * width))


def best_batches(work: Work, cost: Cost, most_tokens: int) -> list[Batch]:
    candidates = (
        batches_of(work, classes, parts, most_tokens)
        for classes in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        for parts in (1, 2, 3, 4, 6, 8)
        if classes * parts <= len(work)
    )
    return min(candidates, key=cost.of)


def some_of(work: Work, batches: list[Batch], cost: Cost, limit: float) -> list[Batch]:
    """Every k-th batch, such that they fill the limit at least half and come nearest to the tokens/s of all of them."""

    def rate(some: Sequence[Batch]) -> float:
        return sum(work[i][1] for batch in some for i in batch.rows) / cost.of(some)

    subsets = [batches[first::k] for k in range(1, len(batches) + 1) for first in range(k)]
    fitting = [some for some in subsets if limit / 2 <= cost.of(some) <= limit]
    if not fitting:
        return [min(batches, key=lambda batch: abs(cost.of([batch]) - limit))]
    return min(fitting, key=lambda some: abs(rate(some) - rate(batches)))


def run_generate(
    model: Any, work: Work, args: argparse.Namespace, most_tokens: int
) -> tuple[Work, dict[str, Any]]:
    cost = measured_cost(model, args.device, args.probe_rows, args.probe_width)
    batches = best_batches(work, cost, most_tokens)
    chosen = some_of(work, batches, cost, args.limit)
    print(f"generate: {cost}; {len(batches)} batches of up to {max(len(b.rows) for b in batches)} rows,"
          f" about {cost.of(batches):.0f} s for all; {len(chosen)} of them run", flush=True)  # fmt: skip
    done: list[int] = []
    seconds, queue = 0.0, chosen[::-1]
    while queue:
        batch = queue.pop()
        try:
            seconds += generate(model, work, batch, args.device)
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            queue += _that_fit(work, batch.rows, batch.tokens * 2 // 3)
            continue
        done += batch.rows
        print(
            f"  {len(batch.rows)} rows, {batch.width} + {batch.steps} tokens: {seconds:.1f} s so far",
            flush=True,
        )
    row = {
        "side": "transformers generate", "rows_at_most": max(len(b.rows) for b in chosen),
        "batches": f"{len(chosen)} of {len(batches)}", "seconds": seconds, "whole_workload_s": cost.of(batches) * seconds / cost.of(chosen),
    }  # fmt: skip
    return [work[i] for i in done], row


# -- continuous batching ----------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_requests_per_batch": 128, "max_batch_tokens": 1024},
    {"max_requests_per_batch": 256, "max_batch_tokens": 1024},
    {"max_requests_per_batch": 128, "max_batch_tokens": 1024, "use_cuda_graph": True, "use_async_batching": True},
]  # fmt: skip


def continuous(model: Any, work: Work, setting: dict[str, Any], limit: float) -> tuple[float, str]:
    """Seconds from the first request added to the last result, and the attention that ran.

    Raises RuntimeError when it breaks or takes longer than the limit.
    """
    config = ContinuousBatchingConfig(allow_block_sharing=False, **setting)
    wanted = {str(i): out for i, (_, out) in enumerate(work)}
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(**SAMPLED, eos_token_id=-1), continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()
        for i, (prompt, out) in enumerate(work):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=out, eos_token_id=-1)
        while wanted:
            result = manager.get_result(timeout=0.5)
            if result is not None and result.is_finished():
                if result.error or len(result.generated_tokens) != wanted.pop(result.request_id):
                    manager.stop(hard_stop=True)
                    raise RuntimeError(result.error or "an output has the wrong length")
            elif result is None and (not manager.is_running() or time.perf_counter() - start > limit):
                manager.stop(hard_stop=True)
                raise RuntimeError(f"{len(wanted)} of {len(work)} requests are not done")
        return time.perf_counter() - start, model.config._attn_implementation


def run_continuous(model: Any, work: Work, args: argparse.Namespace) -> tuple[Work, dict[str, Any]] | None:
    probe = [(prompt, min(out, args.probe_tokens)) for prompt, out in work[: args.probe_requests]]
    tokens, rates = sum(out for _, out in probe), []
    for setting in SETTINGS:
        try:
            rate = tokens / continuous(model, probe, setting, args.limit / 3)[0]
        except Exception as error:  # a setting that this version or card cannot do is one setting less
            print(f"continuous batching, {setting}: {type(error).__name__}: {error}"[:300], flush=True)
            rate = 0.0
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
        rates.append(rate)
        print(f"continuous batching, {setting or 'defaults'}: {rate:,.0f} tokens/s", flush=True)
    best = max(range(len(SETTINGS)), key=rates.__getitem__)
    if not rates[best]:
        return None
    some: Work = []
    while len(some) < len(work) and sum(out for _, out in some) < rates[best] * args.limit * 4:
        some = work[: len(some) + 32]
    try:
        seconds, attention = continuous(model, some, SETTINGS[best], 8 * args.limit)
    except RuntimeError as error:  # what else was measured is kept
        print(f"continuous batching, {len(some)} requests: {error}", flush=True)
        return None
    return some, {"side": "transformers continuous", "setting": str(SETTINGS[best] or "defaults"), "attention": attention,
                  "seconds": seconds}  # fmt: skip


# -- both sides -------------------------------------------------------------------------------------------------


def with_rates(row: dict[str, Any], work: Work, seconds: float, side: str) -> dict[str, Any]:
    """The row, with the engine's seconds for the same requests and the ratio of the two."""
    tokens = sum(out for _, out in work)
    return row | {
        "requests": len(work), "output_tokens": tokens, "output_tokens_per_s": tokens / row["seconds"],
        "headrace_s": seconds, "headrace_tokens_per_s": tokens / seconds, "ratio": row["seconds"] / seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--limit", type=float, default=45, help="seconds for either side of Transformers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--kv-gib", type=float, help="memory for generate's keys and values; default: measured"
    )
    parser.add_argument("--probe-rows", type=int, default=256)
    parser.add_argument("--probe-width", type=int, default=512)
    parser.add_argument("--probe-requests", type=int, default=256)
    parser.add_argument("--probe-tokens", type=int, default=24)
    parser.add_argument("--skip", default="", help="generate or continuous")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    results = results_file.ResultsFile(
        args.out, args.commit, device=args.device, transformers=transformers.__version__, model=args.model
    )
    transformers.logging.set_verbosity_error()
    work = workloads.build("chat")[: args.requests]
    model = transformers_model(args.model, args.device)
    config = model.config
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    free = args.kv_gib * 2**30 if args.kv_gib else MEMORY_SHARE * torch.cuda.mem_get_info()[0]
    sides = []
    if args.skip != "generate":
        sides.append(run_generate(model, work, args, int(free / per_token)))
    if args.skip != "continuous" and (done := run_continuous(model, work, args)):
        sides.append(done)
    del model
    gc.collect()
    if args.device != "cpu":
        torch.cuda.empty_cache()
        print(f"{torch.cuda.mem_get_info()[0] / 2**30:.0f} GiB free for the engine", flush=True)
    engine, _, _ = random_engine(args.model, device=args.device)
    seconds_for(engine, work[:8], "warm")
    rows = [with_rates(row, some, seconds_for(engine, some, row["side"]), row["side"]) for some, row in sides]
    whole = seconds_for(engine, work, "whole")
    tokens = sum(out for _, out in work)
    rows.append({"side": "headrace, whole workload", "requests": len(work), "output_tokens": tokens, "seconds": whole,
                 "output_tokens_per_s": tokens / whole})  # fmt: skip
    for row in rows:
        print(row, flush=True)
    results.append(rows)
    columns = ("side", "requests", "output_tokens", "seconds", "output_tokens_per_s", "headrace_s", "ratio")
    results_file.table([{column: row.get(column, "") for column in columns} for row in rows])


if __name__ == "__main__":
    main()
