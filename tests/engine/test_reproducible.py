"""Noise is a function of seed, position and token id: who else runs, in which order and how often, changes no token."""

import dataclasses
import random
from collections.abc import Iterable

import pytest
import torch
from one_step import OneSequence
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.answers import sampling_of
from headrace.kernels.sample import gumbel_noise

VOCAB = 256
# So hot that the model's logits are nothing beside the noise, which then chooses alone.
NOISE_ALONE = SamplingParams(temperature=1e12, max_tokens=24, ignore_eos=True)


def build(model: str, **options: object) -> Engine:
    defaults = {"dtype": "float32", "device": "cpu", "kv_tokens": 4096, "max_slots": 16, "block_size": 16}
    return Engine(EngineConfig(model=model, weights="random", **(defaults | options)))


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, list[int]]:
    engine.add_many(list(requests))
    done = {}
    while engine.has_work:
        done |= {completion.id: completion.token_ids for completion in engine.poll(1.0).completions}
    engine.check()
    return done


def loudest(seed: int, first: int, count: int) -> list[int]:
    """The tokens with the most noise at ``count`` positions from ``first`` on."""
    ids = torch.arange(VOCAB).expand(count, -1)
    noise = gumbel_noise(torch.full((count,), seed), torch.arange(first, first + count), ids)
    return noise.argmax(dim=-1).tolist()


def seeded(seed: int) -> SamplingParams:
    return dataclasses.replace(NOISE_ALONE, seed=seed)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("kv_tokens", [4096, 320], ids=["roomy", "preempting"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_noise_follows_seed_and_position_whatever_the_batch_the_order_and_preemption(
    model: str, lag: int, kv_tokens: int, order: int
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(1 + 7 * (i % 6))] for i in range(24)]
    requests = [Request(str(i), prompt, seeded(i // 2)) for i, prompt in enumerate(prompts)]
    random.Random(order).shuffle(requests)
    engine = build(model, lag=lag, kv_tokens=kv_tokens, max_batched_tokens=48, max_context=160)
    done = run(engine, requests)
    assert (engine.stats().preemptions > 0) == (kv_tokens == 320)
    for request in requests:
        assert done[request.id] == loudest(request.sampling.seed, len(request.prompt), 24)


def test_prompts_with_one_seed_share_the_noise_of_each_position_and_others_share_none(model: str) -> None:
    done = run(
        build(model),
        [
            Request("three", [5, 6, 7], seeded(7)),
            Request("another three", [9, 8, 7], seeded(7)),
            Request("two", [5, 6], seeded(7)),
            Request("unseeded", [5, 6, 7], NOISE_ALONE),
            Request("unseeded too", [5, 6, 7], NOISE_ALONE),
        ],
    )
    assert done["three"] == done["another three"] == [*done["two"][1:], *done["three"][-1:]]
    assert done["unseeded"] != done["unseeded too"]


@pytest.mark.parametrize("seeds", ["made of ids", "in a row", "of one job's answers"])
def test_tokens_come_as_often_as_the_model_s_logits_say_however_seeds_are_chosen(
    model: str, seeds: str
) -> None:
    engine, draws = build(model, max_slots=256), 3000
    params = SamplingParams(temperature=0.5, top_k=40, top_p=0.8, min_p=0.01, max_tokens=1, ignore_eos=True)
    sampling = {
        "made of ids": lambda n: params,
        "in a row": lambda n: dataclasses.replace(params, seed=n),
        "of one job's answers": lambda n: sampling_of(dataclasses.replace(params, seed=3), n),
    }[seeds]
    tokens = run(engine, (Request(f"r{n}", [5, 6, 7], sampling(n)) for n in range(draws)))
    with torch.inference_mode():
        logits = OneSequence(engine._executor.runner.model, 64).logits([5, 6, 7])[-1:]
    scores = logits / params.temperature
    for warper in (MinPLogitsWarper(0.01), TopKLogitsWarper(40), TopPLogitsWarper(0.8)):
        scores = warper(None, scores)
    expected = draws * scores[0].softmax(-1)
    counts = torch.bincount(torch.tensor([token for (token,) in tokens.values()]), minlength=VOCAB)
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert freedom > 10
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
