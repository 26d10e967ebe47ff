"""The batch-invariant engine: the same bits in any company, however a sequence was cut into steps."""

import random

import pytest
import smollm
import tiny_model

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.request import Outputs

BLOCK = 16
# One token, the edges of blocks, the edges of the three blocks with which every other prompt begins, many chunks.
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 5, 100, 40, 80, 7, 50]
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    # An activation so wide that several rows are more than torch gives one thread.
    return tiny_model.write(tmp_path_factory.mktemp("tiny"), intermediate_size=1000, vocab_size=1000)


def build(model, **options):
    defaults = {
        "weights": "random", "device": "cpu", "kv_tokens": 8192, "max_slots": 40, "block_size": BLOCK,
        "batch_invariant": True,
    }  # fmt: skip
    return Engine(EngineConfig(model=model, **(defaults | options)))


def requests(lengths, max_tokens, vocab):
    """Requests with prompts of these lengths, every other one with the same beginning; greedy and sampled ones."""
    rng = random.Random(0)
    shared = [rng.randrange(3, vocab) for _ in range(3 * BLOCK)]
    asked = []
    for i, length in enumerate(lengths):
        own = [rng.randrange(3, vocab) for _ in range(length)]
        sampling = SamplingParams(
            temperature=float(i % 3 > 0), top_p=0.9 if i % 3 == 2 else 1.0, seed=i, logprobs=3, max_tokens=max_tokens,
            ignore_eos=True, repetition_penalty=1.2 if i % 5 == 4 else 1.0,
        )  # fmt: skip
        asked.append(Request(f"r{i}", (shared + own)[:length] if i % 2 else own, sampling))
    return asked


def bits(logprobs):
    return logprobs.chosen.tobytes(), logprobs.top_ids.tobytes(), logprobs.top.tobytes()


def run(engine, asked):
    """What each request got: its tokens, and the bits of the log-probabilities of these and of the likeliest."""
    engine.add_many(asked)
    done = {}
    while engine.has_work:
        for completion in engine.poll(1.0).completions:
            told = completion.prompt_logprobs if completion.logprobs is None else completion.logprobs
            done[completion.id] = (completion.token_ids, bits(told))
    engine.check()
    return done


def one_by_one(engine, asked):
    done = {}
    for request in asked:
        done |= run(engine, [request])
    return done


@pytest.fixture(scope="module", params=DTYPES)
def reference(request, tiny):
    """The dtype, requests, and what each of them gets alone, nothing shared with those before it."""
    asked = requests(LENGTHS, 12, 1000) + requests(reversed(LENGTHS), 9, 1000)
    asked = [Request(f"r{i}", one.prompt, one.sampling) for i, one in enumerate(asked)]
    return request.param, asked, one_by_one(build(tiny, dtype=request.param, prefix_cache=False), asked)


@pytest.mark.parametrize(
    ("company", "options"),
    [
        (40, {"lag": 0}),
        (40, {"lag": 1, "max_batched_tokens": 47}),
        (40, {"lag": 2, "prefix_cache": False, "max_batched_tokens": 64}),
        (40, {"lag": 1, "max_slots": 3, "max_batched_tokens": 5}),
        (17, {"lag": 2, "max_slots": 16, "max_batched_tokens": 16}),
        (2, {"lag": 0, "block_size": 32}),
    ],
    ids=str,
)
def test_bits_alone_are_bits_in_company_of_any_size_and_order_at_any_chunk_size(
    tiny, reference, company, options
):
    dtype, asked, expected = reference
    chosen = random.Random(company).sample(asked, company)
    engine = build(tiny, dtype=dtype, **options)
    assert run(engine, chosen) == {request.id: expected[request.id] for request in chosen}
    assert run(engine, chosen[:10]) == {request.id: expected[request.id] for request in chosen[:10]}
    if options.get("prefix_cache", True) and company > 2:
        assert engine.stats().prefix_hits > 0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_bits_survive_preemption(tiny, reference, lag):
    dtype, asked, expected = reference
    engine = build(tiny, dtype=dtype, lag=lag, kv_tokens=160, max_slots=8, max_batched_tokens=24)
    assert run(engine, asked) == expected
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_prompts_are_the_same_bits_in_company(tiny, dtype):
    scored = [
        Request(one.id, one.prompt, outputs=Outputs.LOGPROBS, need_from=0, prompt_logprobs=2)
        for one in requests(LENGTHS, 1, 1000)
    ]
    alone = one_by_one(build(tiny, dtype=dtype), scored)
    assert run(build(tiny, dtype=dtype, max_batched_tokens=41), scored) == alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fast_engine_s_bits_do_depend_on_company(tiny, dtype):
    asked = requests(LENGTHS, 12, 1000)
    fast = {"dtype": dtype, "batch_invariant": False}
    assert run(build(tiny, **fast), asked) != one_by_one(build(tiny, **fast), asked)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_model_s_bits_are_the_same_in_company_and_after_preemption(dtype):
    asked = requests([15, 32, 31], 4, 49_152)
    options = {"weights": "checkpoint", "dtype": dtype, "max_context": 128}
    alone = one_by_one(build(str(smollm.path()), kv_tokens=512, **options), asked)
    engine = build(str(smollm.path()), kv_tokens=96, max_slots=3, max_batched_tokens=21, lag=1, **options)
    assert run(engine, asked) == alone
    assert engine.stats().preemptions > 0
