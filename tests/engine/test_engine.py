"""The engine on a tiny random model: what a caller can count on."""

import gc
import random
import weakref

import pytest
import tiny_model
import torch

from headrace.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams
from headrace.engine.errors import EngineError, InvalidRequest, ModelNotFound, OutOfMemory

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def build(model, **options):
    defaults = {"dtype": "float32", "device": "cpu", "kv_tokens": 2048, "max_slots": 8, "block_size": 16}
    return Engine(EngineConfig(model=model, weights="random", **(defaults | options)))


def run(engine):
    done = {}
    while engine.has_work:
        for completion in engine.poll(1.0).completions:
            done[completion.id] = completion
    engine.check()
    return done


def test_the_same_seed_gives_the_same_tokens_in_any_company(model):
    sampled = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, max_tokens=12, seed=7, ignore_eos=True)
    alone = build(model)
    alone.add_many([Request("a", [5, 6, 7], sampled)])
    reference = run(alone)["a"].token_ids
    crowd = build(model, lag=1, max_batched_tokens=8)
    crowd.add_many([Request(f"x{i}", list(range(3, 20 + i)), GREEDY) for i in range(7)])
    crowd.add_many([Request("a", [5, 6, 7], sampled)])
    assert run(crowd)["a"].token_ids == reference
    other = build(model)
    other.add_many(
        [Request("a", [5, 6, 7], SamplingParams(temperature=1.0, max_tokens=12, seed=8, ignore_eos=True))]
    )
    assert run(other)["a"].token_ids != reference


def test_a_cpu_computes_a_long_prompt_in_steps_that_end_soon(tmp_path):
    long = tiny_model.write(tmp_path, max_position_embeddings=4096)
    engine = build(long, kv_tokens=4096, max_slots=None)
    engine.add_many([Request("a", [5] * 2048, SamplingParams(temperature=0, max_tokens=1))])
    run(engine)
    assert engine.stats().steps == 2048 // 256


def test_without_a_seed_the_request_id_makes_one(model):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    engine = build(model)
    engine.add_many([Request("a", [5, 6], params), Request("b", [5, 6], params)])
    done = run(engine)
    again = build(model)
    again.add_many([Request("a", [5, 6], params)])
    assert run(again)["a"].token_ids == done["a"].token_ids != done["b"].token_ids


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (Request("r", []), "prompt", "empty"),
        (Request("r", [256]), "prompt_token_ids", "[0, 256)"),
        (Request("r", [-1]), "prompt_token_ids", "[0, 256)"),
        (Request("r", [3] * 512), "prompt", "at most 511"),
        (Request("r", [3], SamplingParams(temperature=-1)), "temperature", "0 or more"),
        (Request("r", [3], SamplingParams(top_p=0)), "top_p", "(0, 1]"),
        (Request("r", [3], SamplingParams(top_p=float("nan"))), "top_p", "(0, 1]"),
        (Request("r", [3], SamplingParams(top_k=-1)), "top_k", "0"),
        (Request("r", [3], SamplingParams(min_p=2)), "min_p", "[0, 1]"),
        (Request("r", [3], SamplingParams(max_tokens=0)), "max_tokens", "at least 1"),
        (Request("r", [3], SamplingParams(stop_token_ids=tuple(range(40)))), "stop_token_ids", "at most"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_field_and_none_of_its_call_is_taken(
    model, request_, param, words
):
    engine = build(model)
    with pytest.raises(InvalidRequest) as caught:
        engine.add_many([Request("good", [3], GREEDY), request_])
    assert caught.value.param == param
    assert words in str(caught.value)
    assert not engine.has_work


def test_an_id_in_use_is_refused(model):
    engine = build(model)
    engine.add_many([Request("a", [3], GREEDY)])
    with pytest.raises(InvalidRequest, match="'a' is already in use"):
        engine.add_many([Request("a", [4], GREEDY)])
    assert len(run(engine)) == 1


def test_a_sequence_ends_where_the_context_ends(model):
    engine = build(model, max_context=32)
    engine.add_many([Request("a", [3] * 30, SamplingParams(temperature=0, ignore_eos=True))])
    done = run(engine)["a"]
    assert (len(done.token_ids), done.finish_reason) == (2, FinishReason.LENGTH)


def test_an_engine_s_memory_is_freed_when_the_last_reference_goes_not_when_cycles_are_looked_for(model):
    engine = build(model)
    engine.add_many([Request("a", [5, 6, 7], GREEDY)])
    run(engine)
    arena = weakref.ref(engine._executor.runner.kv.arena)
    gc.disable()
    try:
        del engine
        assert arena() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_random_adds_aborts_and_preemptions_leak_no_block(model, lag):
    rng = random.Random(lag)
    engine = build(model, kv_tokens=256, max_context=96, lag=lag, max_batched_tokens=32)
    ended, added = 0, 0
    for _ in range(400):
        if rng.random() < 0.4:
            prompt = [rng.randrange(3, 9)] * rng.randrange(1, 60)
            params = SamplingParams(temperature=rng.choice([0, 1.0]), max_tokens=rng.randrange(1, 36))
            engine.add_many([Request(f"r{added}", prompt, params, priority=rng.randrange(3))])
            added += 1
        if rng.random() < 0.1 and added:
            engine.abort(f"r{rng.randrange(added)}")
        ended += len(engine.step().completions)
        engine.check()
    ended += len(run(engine))
    stats = engine.stats()
    assert ended == added
    assert stats.preemptions > 0
    assert stats.blocks_live == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


def test_streamed_tokens_are_the_completion(model):
    engine = build(model, lag=1)
    engine.add_many([Request("a", [5, 6], GREEDY, stream=True)])
    streamed = []
    while engine.has_work:
        output = engine.step()
        for request_id, ids in output.tokens:
            assert request_id == "a"
            streamed += ids
        for completion in output.completions:
            assert completion.token_ids == streamed
    assert len(streamed) == 8


def test_a_sequence_of_which_no_number_comes_leaves_nothing_to_the_next_owner_of_its_blocks(tmp_path):
    model = tiny_model.write(tmp_path, tie_word_embeddings=False)
    healthy = [Request(str(i), [5 + i] * (9 + i), GREEDY) for i in range(6)]
    clean, engine = build(model, kv_tokens=128), build(model, kv_tokens=128)
    for each in (clean, engine):
        each._executor.runner.model.embedding.weight[4] = float("nan")
    engine.add_many([Request("bad", [4] * 112, GREEDY)])
    run(engine)
    for each in (clean, engine):
        each.add_many(healthy)
    after, expected = run(engine), run(clean)
    assert [after[each.id].token_ids for each in healthy] == [expected[each.id].token_ids for each in healthy]


def test_what_cannot_be_built_says_why(model, tmp_path):
    with pytest.raises(ModelNotFound):
        Engine(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))
    with pytest.raises(EngineError, match="raise kv_tokens"):
        build(model, kv_tokens=3)
    with pytest.raises(
        EngineError, match=r"max_context is 513, but the model takes 512 .*HEADRACE_MAX_CONTEXT"
    ):
        build(model, max_context=513)
    assert build(model, max_context=512).info.max_context == 512
    for device in ("gpu", "cuda:", "mps", "cuda:-1"):
        with pytest.raises(EngineError, match=r"HEADRACE_DEVICE"):
            build(model, device=device)
    with pytest.raises(EngineError, match="dtype"):
        EngineConfig(model=model, dtype="int3")
    with pytest.raises(EngineError, match="lag"):
        EngineConfig(model=model, lag=3)


def test_a_device_that_cannot_hold_the_model_is_told_with_what_was_asked_for(model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 16.00 GiB")

    monkeypatch.setattr("headrace.engine.build.KVCache", full)
    with pytest.raises(OutOfMemory, match=r"cpu cannot hold .* tried to allocate 16\.00 GiB"):
        build(model)
