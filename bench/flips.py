"""How often company changes a token: each request alone, and the same requests among many others.

    python bench/flips.py --model qwen3-0.6b --out bench/results/flips.json
    python bench/flips.py --model path/to/SmolLM2-135M-Instruct --device cpu --company 48 --out bench/results/flips.json

Noise is the same in any company; logits are not, since split counts, matrix tiles and the chunks of a prompt follow the batch, and sums
in another order round another way. A token flips where two candidates are nearer than that. From there on the two answers are of
different texts, so only the first difference counts: flips per token is first differences over tokens up to and with them. As a
control the requests run alone a second time, by which nothing may change.

A name in SHAPES is a model of random weights with prompts of random tokens; their logits are flatter than a trained model's, and flip
more. A directory is a real model, asked the prompts of --prompts.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable
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
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "sampled, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
}
Answers = list[list[int]]


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of the chat workload."""
    return [prompt[:LONGEST_PROMPT] for prompt, _ in workloads.build("chat")[:count]]


def real_prompts(path: Path, model: Path, count: int) -> list[list[int]]:
    """Token ids of the first chats of a JSON Lines file, as the model's template puts them."""
    tokenizer = Tokenizer.load(model)
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines() if '"messages"' in line]
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


def requests_of(prompts: list[list[int]], sampling: SamplingParams, tag: str) -> list[Request]:
    """A request for each prompt, seeded by its number. The tag keeps a run from the prefixes that another left."""
    return [
        Request(
            f"{tag}-{n}", np.array(prompt, np.int32), dataclasses.replace(sampling, seed=n), salt=f"{tag}-{n}"
        )
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


def main() -> None:
    """Print a table of kinds of sampling, in company and as a control alone again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a directory of weights"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--answers", type=int, default=16, help="requests that run alone and in company")
    parser.add_argument("--company", type=int, default=256, help="requests at once, those among them")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="what a real model is asked")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    args = parser.parse_args()
    options = {"device": args.device, "dtype": args.dtype}
    if args.model in SHAPES:
        prompts = random_prompts(args.company)
        with config_directory(SHAPES[args.model]) as folder:
            engine = Engine(EngineConfig(model=str(folder), weights="random", **options))
    else:
        prompts = real_prompts(args.prompts, Path(args.model), args.company)
        engine = Engine(EngineConfig(model=args.model, **options))
    rows = []
    for kind in args.kinds:
        sampling = SamplingParams(**KINDS[kind], max_tokens=args.tokens, ignore_eos=True)

        def alone(tag: str, sampling: SamplingParams = sampling) -> Answers:
            return [
                ask(engine, [request])[0]
                for request in requests_of(prompts[: args.answers], sampling, tag)
            ]  # fmt: skip

        first, again = alone(f"{kind} alone"), alone(f"{kind} again")
        crowd = ask(engine, requests_of(prompts, sampling, f"{kind} crowd"))[: args.answers]
        for company, answers in (
            ("alone again", again),
            (f"with {args.company - args.answers} others", crowd),
        ):
            rows.append(
                {"model": Path(args.model).name, "dtype": args.dtype, "sampling": kind, "company": company}
                | compared(first, answers)
            )
    engine.close()
    results_file.table(rows)
    results_file.write(args.out, rows, args.commit, **options)


if __name__ == "__main__":
    main()
