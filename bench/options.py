"""What sampling options cost: the same workload plain, and with an option on every row.

    python bench/options.py --model qwen3-0.6b --workload chat --reps 2 --out bench/results/options.json

Runs on CUDA, or with --device cpu --model tiny --limit 50 to see that it works. The kinds take turns, so that a change of the
machine's speed meets all of them alike. A JSON schema needs llguidance: where it is not installed, its wheel may be unpacked into any
directory on PYTHONPATH. The model's weights are random, and so is the vocabulary that its tokens are given for this.
"""

import argparse
import dataclasses
import random
import statistics
import time
from pathlib import Path
from typing import Any

import results_file
import workloads
from random_model import SHAPES, random_engine, requests_of

from headrace.engine import Engine, EngineConfig, Request
from headrace.engine.closing import Closing
from headrace.engine.grammar import Grammar
from headrace.engine.grammars import Grammars, Vocabulary
from headrace.engine.request import ModelInfo

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "top_p and penalties": {"top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "bad_words": {"bad_words": ((5,), (6, 7), (8, 9, 10))},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "json schema": {},
}  # fmt: skip
# A random model hardly ever closes a string: so answers are as long as they may be, as those of the other kinds.
SCHEMA = Grammar.json_schema({
    "type": "object",
    "properties": {"title": {"type": "string"}, "text": {"type": "string"}, "score": {"type": "integer"}},
    "required": ["title"],
    "additionalProperties": False,
})  # fmt: skip
SHORTEST = 16
"""Tokens that an answer under the schema is given at least."""


class MadeUpTokens:
    """Every byte, some signs of JSON, and words from random letters to fill a vocabulary, as in a model's own. Id 0 ends."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, vocab_size: int) -> None:
        rng = random.Random(0)
        words = {bytes([byte]): None for byte in range(256)}
        for sign in ('"', '",', '":', '"}', ' "', '{"', '["', "\\"):
            words |= {(sign + text).encode(): None for text in ("", " ", "\n", "a", "s", " a")}
        while len(words) < vocab_size - 1:
            text = "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randint(2, 9)))
            words[(rng.choice(("", " ", " ")) + text + rng.choice(("", "", "", "", ".", ","))).encode()] = (
                None
            )
        self.tokens = [b"<end>", *words]

    def __call__(self, text: bytes) -> list[int]:
        return [1 + byte for byte in text]


def made_up_vocabulary(info: ModelInfo) -> Vocabulary:
    """For models that come without a tokenizer."""
    import llguidance

    made_up = MadeUpTokens(info.vocab_size)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(made_up), eos_token=[0])
    return Vocabulary(tokenizer, Closing([b"", *made_up.tokens[1:]]))


def with_schema(requests: list[Request]) -> list[Request]:
    """The same requests, each with a JSON schema, and room for it."""
    return [
        dataclasses.replace(
            request,
            grammar=SCHEMA,
            sampling=dataclasses.replace(
                request.sampling, max_tokens=max(request.sampling.max_tokens or 0, SHORTEST)
            ),
        )
        for request in requests
    ]


def with_options(work: list, tag: str, kind: str) -> list[Request]:
    """The workload's requests, each with the options of a kind."""
    requests = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **KINDS[kind]))
        for request in requests_of(work, tag)
    ]
    return with_schema(requests) if kind == "json schema" else requests


def speed(engine: Engine, requests: list[Request]) -> float:
    """Generated tokens a second, from the first request added to the last completion."""
    tokens = 0
    start = time.perf_counter()
    engine.add_many(requests)
    while engine.has_work:
        for done in engine.step().completions:
            if done.error is not None:
                raise done.error
            tokens += len(done.token_ids)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    """Print a table: tokens a second of each kind, and its share of plain."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--workload", default="chat", help="chat, extract, longdoc or decode")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only the first requests of the workload")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="beside plain")
    args = parser.parse_args()
    asked = {"device": args.device, "limit": args.limit}
    results = results_file.ResultsFile(args.out, args.commit, device=args.device, options=asked)
    _, parts, _ = random_engine(args.model, device=args.device)
    parts = dataclasses.replace(parts, grammars=Grammars(parts.info, made_up_vocabulary))
    engine = Engine(EngineConfig(model=args.model), parts)
    work = workloads.build(args.workload)[: args.limit]
    kinds = list(dict.fromkeys(["plain", *args.kinds]))
    for kind in kinds:
        speed(engine, with_options(work[:64], f"warm-{kind}", kind))
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for rep in range(args.reps):
        for kind in kinds:
            speeds[kind].append(speed(engine, with_options(work, f"{kind}-{rep}", kind)))
    engine.close()
    plain = statistics.median(speeds["plain"])
    rows = [
        {
            "model": args.model,
            "workload": args.workload,
            "options": kind,
            "output_tokens_per_s": statistics.median(measured),
            "share_of_plain": statistics.median(measured) / plain,
        }
        for kind, measured in speeds.items()
    ]
    for row in rows:
        print(
            f"{row['options']:<22}{row['output_tokens_per_s']:>12,.0f} out/s{row['share_of_plain']:>8.3f} of plain"
        )
    results.append(rows)


if __name__ == "__main__":
    main()
