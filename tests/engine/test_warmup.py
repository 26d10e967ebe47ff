"""What a GPU has compiled when an engine is ready, found out without one: launches say what they would need."""

import random

import pytest
import tiny_model
import torch
from fake_graphs import WithGraphs
from offline_compile import specialisations_met

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.build import build
from headrace.engine.graphs import GraphCache
from headrace.engine.request import Outputs
from headrace.engine.staging import Staging
from headrace.engine.warmup import compile_kernels, run_large_steps
from headrace.kernels.prefill_hopper import PAGE

MULTIPROCESSORS = 132
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8, "logprobs": 2},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": ((3, 2.0),), "bad_words": ((5,), (7, 8, 9)), "logprobs": 0},
]


@pytest.fixture
def met(monkeypatch, replays):
    """The launchers' view of an H200, at least as far as it chooses kernels."""
    kernels = (
        "decode_attention",
        "shared_prefix",
        "edit_logits",
        "prefill_hopper",
        "swiglu",
        "swiglu_hopper",
    )
    for kernel in kernels:
        monkeypatch.setattr(f"headrace.kernels.{kernel}.multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(
        "headrace.kernels.prefill_hopper.suits",
        lambda k: k.dtype == torch.bfloat16 and k.shape[2] == PAGE and k.shape[3] in (64, 128),
    )
    for module in ("headrace.engine.warmup", "headrace.kernels.swiglu"):
        monkeypatch.setattr(f"{module}.suits", lambda x, weight: x.dtype == torch.bfloat16)
    monkeypatch.setattr("headrace.kernels.swiglu.pays", lambda tokens, *_: 100 <= tokens < 200)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    # A copy to a GPU begins at a multiple of 16 bytes, wherever the array stood.
    monkeypatch.setattr(Staging, "upload", lambda self, arrays: [torch.tensor(array) for array in arrays])
    with specialisations_met(monkeypatch) as specialisations:
        yield specialisations


def ready_engine(path, *, graphs, **options):
    """An engine that has done what build does on a GPU."""
    config = EngineConfig(model=path, weights="random", device="cpu", lag=1, **options)
    parts = build(config)
    runner = parts.executor.runner
    compile_kernels(runner)
    cache = GraphCache(runner) if graphs else None
    if cache is not None:
        cache.capture_all()
    run_large_steps(runner, cache.sizes if cache else [runner.max_slots], config.max_batched_tokens)
    engine = Engine(config, parts)
    if cache is not None:
        engine._executor = WithGraphs(parts.executor, cache)
    return engine


def requests(count, longest):
    rng = random.Random(3)
    shared = [rng.randrange(3, 250) for _ in range(300)]
    asked = []
    for i in range(count):
        own = [rng.randrange(3, 250) for _ in range(rng.choice([1, 15, 16, 17, 100, longest - 330]))]
        prompt = shared + own if i % 2 else own
        params = {"temperature": 1.0, "max_tokens": rng.randrange(1, 25), "ignore_eos": True}
        asked.append(Request(f"r{i}", prompt, SamplingParams(**params | OPTIONS[i % 5])))
        if i % 7 == 0:
            asked.append(Request(f"v{i}", prompt, outputs=Outputs.VECTOR))
            asked.append(Request(f"l{i}", prompt, outputs=Outputs.LOGPROBS, need_from=0, prompt_logprobs=2))
    return asked


@pytest.mark.parametrize("heads", [(16, 8), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("options", [
    {"graphs": True}, {"graphs": False}, {"graphs": True, "batch_invariant": True},
], ids=str)  # fmt: skip
def test_no_step_needs_a_kernel_that_is_not_compiled_when_the_engine_is_ready(tmp_path, met, options, heads):
    model = tiny_model.write(tmp_path / "m", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=64,
                             hidden_size=32, intermediate_size=32, max_position_embeddings=4096)  # fmt: skip
    engine = ready_engine(model, max_slots=64, kv_tokens=16384, max_batched_tokens=700, **options)
    ready, waiting = set(met), requests(120, 2000)
    while waiting or engine.has_work:
        if waiting:
            engine.add_many(
                [waiting.pop() for _ in range(min(random.Random(len(waiting)).randrange(1, 9), len(waiting)))]
            )
        engine.step()
    engine.check()
    assert met - ready == set()
