"""The engine on CUDA: the same tokens as on the CPU, whatever is captured, overlapped or preempted."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import build_model
from headrace.engine.request import Outputs, Pooling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "attention_bias": False, "rope_theta": 10000.0,
}  # fmt: skip


# Of eight requests in turn, five use options that look at what was said or report on it.
OPTIONS = [
    {},
    {},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    {},
    {"logit_bias": ((3, 2.0), (4, -5.0)), "bad_words": ((5,), (3, 3), (7, 8, 9)), "logprobs": 0},
    {"allowed_token_ids": tuple(range(100, 400)), "repetition_penalty": 0.9},
    {"stop_token_ids": (11, 12, 13), "min_tokens": 25},
]


def written(path, **changes):
    import json

    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    model = build_model(ModelConfig.from_directory(path), "cpu", torch.float32)
    model.random_init(seed=1)
    for _, tensor in model.destinations():
        tensor.mul_(4.0)  # spread the logits, so that no near-tie decides
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in model.destinations()},
        path / "model.safetensors",
    )
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return written(tmp_path_factory.mktemp("model"))


def requests(count=40):
    rng = random.Random(0)
    shared = [rng.randrange(1000) for _ in range(400)]
    out = []
    for i in range(count):
        own = [rng.randrange(1000) for _ in range(rng.choice([1, 5, 31, 32, 33, 64, 100, 300]))]
        out.append(
            Request(
                f"r{i}",
                shared + own if i % 3 == 0 else own,
                SamplingParams(
                    temperature=0.0 if i % 2 else 1.0,
                    top_p=0.9 if i % 4 == 0 else 1.0,
                    seed=i,
                    max_tokens=rng.randrange(30, 90),
                    ignore_eos=True,
                    **OPTIONS[i % 8],
                ),
            )
        )
    return out


def run(engine):
    done = {}
    while engine.has_work:
        done |= {c.id: c.token_ids for c in engine.step().completions}
    engine.check()
    assert engine.stats().blocks_live == 0
    return done


@pytest.fixture(scope="module")
def reference(model):
    engine = Engine(EngineConfig(model=model, device="cpu", dtype="float32", kv_tokens=32768, max_slots=64))
    engine.add_many(requests())
    return run(engine)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kv_tokens", [32768, 1024])
def test_tokens_are_those_of_the_cpu_with_and_without_graphs_overlap_and_preemption(
    model, reference, lag, graphs, kv_tokens
):
    engine = Engine(
        EngineConfig(model=model, device="cuda", dtype="float32", kv_tokens=kv_tokens, max_slots=64, lag=lag,
                     cuda_graphs=graphs, max_batched_tokens=256)
    )  # fmt: skip
    engine.add_many(requests())
    done = run(engine)
    assert (engine.stats().preemptions > 0) == (kv_tokens == 1024)
    equal = sum(done[name] == reference[name] for name in reference)
    assert equal >= len(reference) - 1, f"only {equal} of {len(reference)} agree"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_batch_invariant_bits_of_a_run_alone_are_those_in_company_however_it_is_cut(model, dtype):
    def told(requests, together, **options):
        engine = Engine(
            EngineConfig(
                model=model, device="cuda", dtype=dtype, max_slots=64, batch_invariant=True, **options
            )
        )
        done = {}
        for batch in [requests] if together else [[request] for request in requests]:
            engine.add_many(batch)
            while engine.has_work:
                for c in engine.step().completions:
                    logprobs = c.logprobs
                    done[c.id] = c.token_ids, logprobs and (logprobs.chosen.tobytes(), logprobs.top.tobytes())
        return done, engine.stats()

    alone, _ = told(requests(), together=False, kv_tokens=32768, prefix_cache=False)
    ample, scarce = {"kv_tokens": 32768}, {"kv_tokens": 1024, "max_batched_tokens": 97}
    for options in (
        {"lag": 0} | ample,
        {"lag": 1} | scarce,
        {"lag": 1, "cuda_graphs": False} | scarce,
        {"lag": 2} | scarce,
    ):
        company, stats = told(requests(), together=True, **options)
        assert company == alone, options
        assert (stats.preemptions > 0) == (options["kv_tokens"] == 1024)


def looks():
    """Prompts of 1 to 400 tokens that are scored from some place on, or pooled."""
    rng, out = random.Random(2), []
    for i in range(30):
        prompt = [rng.randrange(3, 1000) for _ in range(rng.randrange(1, 400))]
        if i % 2:
            asked = {"outputs": Outputs.VECTOR, "pooling": list(Pooling)[i % 3]}
        else:
            asked = {
                "outputs": Outputs.LOGPROBS,
                "need_from": rng.randrange(len(prompt)),
                "prompt_logprobs": i % 5,
            }
        out.append(Request(f"look {i}", prompt, **asked))
    return out


def test_what_is_read_off_prompts_is_that_of_the_cpu_beside_prompts_that_are_answered(model):
    found = []
    for device, options in (("cpu", {}), ("cuda", {"max_batched_tokens": 256, "lag": 2})):
        engine = Engine(
            EngineConfig(
                model=model, device=device, dtype="float32", kv_tokens=32768, max_slots=64, **options
            )
        )
        engine.add_many([*requests(), *looks()])
        done = {}
        while engine.has_work:
            done |= {completion.id: completion for completion in engine.step().completions}
        found.append([done[request.id] for request in looks()])
    for cpu, cuda in zip(*found, strict=True):
        if cpu.vector is not None:
            np.testing.assert_allclose(cuda.vector, cpu.vector, atol=1e-3, rtol=1e-3)
        else:
            np.testing.assert_allclose(cuda.prompt_logprobs.chosen, cpu.prompt_logprobs.chosen, atol=1e-3)
            np.testing.assert_allclose(cuda.prompt_logprobs.top, cpu.prompt_logprobs.top, atol=1e-3)


@pytest.mark.parametrize(
    ("lag", "dtype", "batch_invariant", "graphs"),
    [
        (0, "float32", True, True),
        (2, "bfloat16", True, True),
        (1, "bfloat16", False, True),
        (1, "bfloat16", False, False),
        (2, "float32", False, True),
    ],
)
def test_sequences_of_which_no_number_comes_fail_alone(tmp_path, lag, dtype, batch_invariant, graphs):
    bad, untied = 7, written(tmp_path, tie_word_embeddings=False)

    def without_it(request):
        return dataclasses.replace(request, prompt=[8 if token == bad else token for token in request.prompt])

    def with_it(request):
        prompt = [*request.prompt[:-1], bad, request.prompt[-1]]
        return dataclasses.replace(
            request, id=f"bad {request.id}", prompt=prompt, need_from=request.need_from and 0
        )

    def ended(asked):
        config = EngineConfig(
            model=untied, device="cuda", dtype=dtype, kv_tokens=8192, max_slots=32, lag=lag, cuda_graphs=graphs,
            batch_invariant=batch_invariant, max_batched_tokens=256,
        )  # fmt: skip
        engine = Engine(config)
        engine._executor.runner.model.embedding.weight[bad] = float("nan")  # where the graphs read it
        engine.add_many(asked)
        done = {}
        while engine.has_work:
            done |= {completion.id: completion for completion in engine.step().completions}
        engine.check()
        assert engine.stats().blocks_live == 0
        return done

    good = [without_it(request) for request in [*requests(), *looks()]]
    spoilt = [with_it(request) for request in good]
    mixed = good + spoilt
    random.Random(5).shuffle(mixed)
    alone, company = ended(good), ended(mixed)
    assert {company[request.id].error.code for request in spoilt} == {"non_finite_values"}
    for request in good:
        ours, theirs = company[request.id], alone[request.id]
        assert (ours.error is not None) == (ours.token_ids[-1:] == [bad] and ours.finish_reason == "abort")
        if batch_invariant:
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_compiles_after_ready(model, batch_invariant):
    import triton

    engine = Engine(
        EngineConfig(
            model=model, device="cuda", dtype="bfloat16", kv_tokens=32768, max_slots=64, batch_invariant=batch_invariant
        )
    )  # fmt: skip
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs["fn"].name)
    try:
        engine.add_many(requests())
        run(engine)
        engine.add_many([Request("long", [7] * 900, SamplingParams(max_tokens=4)), *looks()])
        run(engine)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_random_adds_and_aborts_leak_no_block(model):
    rng = random.Random(3)
    engine = Engine(
        EngineConfig(model=model, device="cuda", dtype="bfloat16", kv_tokens=1024, max_slots=16, lag=2)
    )
    added = ended = 0
    for step in range(10_000):
        if rng.random() < 0.2:
            params = SamplingParams(temperature=1.0, max_tokens=rng.randrange(1, 60), seed=step)
            engine.add_many(
                [
                    Request(
                        f"r{added}",
                        [rng.randrange(3)] * rng.randrange(1, 200),
                        params,
                        priority=rng.randrange(3),
                    )
                ]
            )
            added += 1
        if rng.random() < 0.05 and added:
            engine.abort(f"r{rng.randrange(added)}")
        ended += len(engine.step().completions)
        if step % 100 == 0:
            engine.check()
    while engine.has_work:
        ended += len(engine.step().completions)
    assert ended == added
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.preemptions > 0
