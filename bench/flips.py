"""How often company changes a token: each request alone, and the same requests among many others.

    python bench/flips.py --model qwen3-0.6b --out bench/results/flips.json
    python bench/flips.py --model path/to/SmolLM2-135M-Instruct --device cpu --company 48 --modes fast --out flips.json

Noise is the same in any company; logits are not, since split counts, matrix tiles and the chunks of a prompt follow the batch, and sums
in another order round another way. A token flips where two candidates are nearer than that. From there on the two answers are of
different texts, so only the first difference counts: flips per token is first differences over tokens up to and with them. As a
control the requests run alone a second time, by which nothing may change. In the mode batch_invariant no token may flip; what it costs
shows in the tokens a second of the company.

A name in SHAPES is a model of random weights with prompts of random tokens; their logits are flatter than a trained model's, and flip
more. A directory is a real model, asked the prompts of --prompts.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import results_file
import workloads
from random_model import SHAPES, config_directory

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.tokenizer import Tokenizer

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
LONGEST_PROMPT = 400
KINDS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=1.0)}
MODES = ("fast", "batch_invariant")
Answers = list[list[int]]


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of the chat workload."""
    return [prompt[:LONGEST_PROMPT] for prompt, _ in workloads.build("chat")[:count]]


def real_prompts(path: Path, model: Path, count: int) -> list[list[int]]:
    """Token ids of the first chats of a JSON Lines file, as the model's template puts them."""
    tokenizer = Tokenizer.load(model)
    jobs = [json.loads(line) for line in path.read_text().splitlines()]
    chats = [chat for job in jobs if (chat := job.get("body", job).get("messages"))]
    if len(chats) < count:
        raise SystemExit(f"{path} has {len(chats)} chats: --company can be at most that")
    return tokenizer.encode_rendered([tokenizer.render_chat(chat) for chat in chats[:count]])


def ask(engine: Engine, requests: Iterable[Request]) -> Answers:
    """The tokens of each request, all of them run at once."""
    requests = list(requests)
    engine.add_many(requests)
    done: dict[str, list[int]] = {}
    while engine.has_work:
        done |= {completion.id: completion.token_ids for completion in engine.step().completions}
    return [done[request.id] for request in requests]


def requests_of(prompts: list[list[int]], sampling: SamplingParams) -> list[Request]:
    """A request for each prompt, seeded by its number."""
    return [
        Request(str(n), np.array(prompt, np.int32), dataclasses.replace(sampling, seed=n))
        for n, prompt in enumerate(prompts)
    ]


def compared(one: Answers, other: Answers) -> dict[str, Any]:
    """How many answers differ, and at which rate tokens flip."""
    firsts = [
        next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
        for x, y in zip(one, other, strict=True)
    ]
    flips = sum(first is not None for first in firsts)
    tokens = sum(
        len(answer) if first is None else first + 1 for answer, first in zip(one, firsts, strict=True)
    )
    return {"answers": len(one), "differ": flips, "tokens": tokens, "flips_per_token": flips / tokens}


def measured(
    engine: Engine, prompts: list[list[int]], answers: int, sampling: SamplingParams
) -> list[dict[str, Any]]:
    """Rows for the first ``answers`` prompts: alone again, and among all of them."""

    def alone() -> Answers:
        return [ask(engine, [request])[0] for request in requests_of(prompts[:answers], sampling)]

    first, again = alone(), alone()
    start = time.perf_counter()
    crowd = ask(engine, requests_of(prompts, sampling))
    rate = sum(map(len, crowd)) / (time.perf_counter() - start)
    return [
        {"company": 0, **compared(first, again), "output_tokens_per_s": None},
        {"company": len(prompts) - 1, **compared(first, crowd[:answers]), "output_tokens_per_s": rate},
    ]


def main() -> None:
    """Print a table: modes, kinds of sampling, and how often a token flipped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a directory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--answers", type=int, default=16, help="requests that run alone and in company")
    parser.add_argument("--company", type=int, default=256, help="requests at once, those among them")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="what a real model is asked")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    args = parser.parse_args()
    results = results_file.ResultsFile(
        args.out, args.commit, device=args.device, device_asked=args.device, dtype=args.dtype
    )
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        random = args.model in SHAPES
        folder = stack.enter_context(config_directory(SHAPES[args.model])) if random else Path(args.model)
        prompts = random_prompts(args.company) if random else real_prompts(args.prompts, folder, args.company)
        room = max(map(len, prompts)) + args.tokens + 64
        for mode in args.modes:
            config = EngineConfig(
                model=str(folder), weights="random" if random else "checkpoint", device=args.device, dtype=args.dtype,
                max_slots=args.company, max_context=room, kv_tokens=room * args.company,
                prefix_cache=False, batch_invariant=mode == "batch_invariant",
            )  # fmt: skip
            engine = Engine(config)
            for kind in args.kinds:
                sampling = dataclasses.replace(KINDS[kind], max_tokens=args.tokens, ignore_eos=True)
                for row in measured(engine, prompts, args.answers, sampling):
                    rows.append({"model": Path(args.model).name, "mode": mode, "sampling": kind, **row})
            engine.close()
            del engine  # before the next one takes memory
    results_file.table(rows)
    results.append(rows)


if __name__ == "__main__":
    main()
