"""The engine against Transformers' batched ``generate`` on one CPU: the same prompts, greedy, bf16, side by side.

    python bench/cpu_vs_transformers.py --prompts examples/prompts.jsonl --out bench/results/cpu_vs_transformers.json

Transformers gets its best: prompts sorted by length, left-padded batches, the fastest of several batch sizes. Both stop
at the end of sequence. The two take turns, and who goes first alternates. A line that is no prompt is passed over.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import results_file
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.local.model import default_model

Run = Callable[[list[list[int]]], int]


class Measured(NamedTuple):
    """One run. cpu_s is what it used of all threads: the fairer figure where others use the machine too."""

    wall_s: float
    cpu_s: float
    tokens: int

    def __str__(self) -> str:
        rate = self.tokens / self.wall_s
        return f"{self.wall_s:.1f} s, {self.cpu_s:.1f} CPU s, {self.tokens} tokens ({rate:.0f} tokens/s)"


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of each line that holds messages or a prompt, OpenAI batch lines included."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            job = json.loads(line)
            job = job.get("body", job)
            if "messages" in job:
                ids = tokenizer.apply_chat_template(job["messages"], add_generation_prompt=True)["input_ids"]
            else:
                ids = tokenizer(job["prompt"])["input_ids"]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        prompts.append(ids)
    return prompts


def headrace(model: Path, max_new_tokens: int) -> Run:
    """Run through a fresh engine each time, so that the prefix cache starts empty; building it is not timed."""

    def run(prompts: list[list[int]]) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        engine.add_many([Request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
        tokens = 0
        while engine.has_work:
            tokens += sum(len(completion.token_ids) for completion in engine.step().completions)
        return tokens

    engine = Engine(EngineConfig(model=str(model), device="cpu", dtype="bfloat16"))
    return run


def batched_generate(model: Any, max_new_tokens: int, batch_size: int) -> Run:
    """Transformers: the longest prompts first, padded on the left to the longest of each batch."""
    ends = torch.tensor(model.generation_config.eos_token_id).reshape(-1)

    def run(prompts: list[list[int]]) -> int:
        tokens = 0
        ordered = sorted(prompts, key=len, reverse=True)
        for start in range(0, len(ordered), batch_size):
            batch = ordered[start : start + batch_size]
            width = len(batch[0])
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)[
                :, width:
            ]
            ended = torch.isin(output, ends).cumsum(dim=1) > 0
            tokens += int((~ended).sum())
        return tokens

    return run


def timed(run: Run, prompts: list[list[int]]) -> Measured:
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens = run(prompts)
    return Measured(time.perf_counter() - start, time.process_time() - cpu_start, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts.jsonl"))
    parser.add_argument("--model", type=Path, default=None, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", default="8,16,32,64")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu_vs_transformers.json"))
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    path = args.model or default_model()
    prompts = read_prompts(args.prompts, AutoTokenizer.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    print(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, {args.threads} threads")

    sizes = [int(size) for size in args.batch_sizes.split(",")]
    tried: dict[int, Measured] = {}
    for size in sizes if len(sizes) > 1 else []:
        tried[size] = timed(batched_generate(model, args.max_new_tokens, size), prompts)
        print(f"transformers, batches of {size}: {tried[size]}", flush=True)
    best = min(tried, key=lambda size: tried[size].wall_s, default=sizes[0])

    runs: dict[str, list[Measured]] = {"headrace": [], "transformers": []}
    for rep in range(args.reps):
        for name in sorted(runs, reverse=bool(rep % 2)):
            theirs = batched_generate(model, args.max_new_tokens, best)
            run = headrace(path, args.max_new_tokens) if name == "headrace" else theirs
            runs[name].append(timed(run, prompts))
            print(f"{name}: {runs[name][-1]}", flush=True)

    rate = {name: statistics.median(m.tokens / m.wall_s for m in of) for name, of in runs.items()}
    cpu_rate = {name: statistics.median(m.tokens / m.cpu_s for m in of) for name, of in runs.items()}
    ratio = rate["headrace"] / rate["transformers"]
    cpu_ratio = cpu_rate["headrace"] / cpu_rate["transformers"]
    print(f"headrace gives {ratio:.2f}x the tokens/s, {cpu_ratio:.2f}x the tokens a CPU second")
    result = {
        "device": f"{results_file.cpu()}, {args.threads} threads",
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": path.name,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": args.max_new_tokens,
        "transformers_batch_size": best,
        "transformers_tried": {str(size): measured._asdict() for size, measured in tried.items()},
        "rows": [{"engine": name, **measured._asdict()} for name, of in runs.items() for measured in of],
        "output_tokens_per_s": {name: round(value, 1) for name, value in rate.items()},
        "ratio": round(ratio, 3),
        "ratio_per_cpu_second": round(cpu_ratio, 3),
        "load_average": os.getloadavg()[0],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
