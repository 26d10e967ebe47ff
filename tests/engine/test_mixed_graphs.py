"""What a captured mixed step computes, replayed without a GPU: its inputs padded, its result where the graph puts it."""

import random

import pytest
from fake_graphs import WithGraphs

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.build import build
from headrace.engine.mixed_graphs import PREFILL_ROWS, MixedGraphs


def engine_of(model, *, graphs, **options):
    options = {"kv_tokens": 2048, "max_slots": 80, "block_size": 16, "max_context": 256} | options
    config = EngineConfig(model=model, weights="random", dtype="float32", device="cpu", **options)
    parts = build(config)
    engine = Engine(config, parts)
    if graphs:
        mixed = MixedGraphs(parts.executor.runner)
        mixed.capture_all(None)
        engine._executor = WithGraphs(parts.executor, mixed)
    return engine


def answers(engine, count=60, beginning=()):
    rng = random.Random(1)
    waiting = []
    for i in range(count):
        prompt = [*beginning, *(rng.randrange(3, 250) for _ in range(rng.choice([1, 5, 16, 17, 40, 120])))]
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=rng.randrange(1, 30), ignore_eos=True
        )
        waiting.append(Request(f"r{i}", prompt, params))
    done = {}
    while waiting or engine.has_work:
        if waiting:
            engine.add_many([waiting.pop() for _ in range(min(3, len(waiting)))])
        done |= {completion.id: completion.token_ids for completion in engine.step().completions}
    engine.check()
    return done


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("kv_tokens", [16_384, 640], ids=["room", "preemptions"])
def test_tokens_are_those_of_plain_steps(model, replays, lag, kv_tokens):
    options = {"lag": lag, "kv_tokens": kv_tokens, "max_batched_tokens": 200}
    expected = answers(engine_of(model, graphs=False, **options))
    engine = engine_of(model, graphs=True, **options)
    assert answers(engine) == expected
    assert len({len(graph.results[0]) for graph in replays}) > 2, "several sizes of graphs were used"
    if kv_tokens < 1000:
        assert engine.stats().preemptions > 0


def test_more_prompts_than_a_graph_has_rows_for_go_without(model, replays):
    engine = engine_of(model, graphs=True, max_slots=80)
    requests = [
        Request(f"r{i}", [i + 3, 4], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        for i in range(PREFILL_ROWS + 1)
    ]
    engine.add_many(requests)
    while engine.has_work:
        engine.step()
    assert not replays
    engine.add_many([Request(f"again{r.id}", r.prompt, r.sampling) for r in requests[:-1]])
    while engine.has_work:
        engine.step()
    assert len(replays) == 1


@pytest.mark.parametrize("most_keys_of_graphs", [2**20, 200])
def test_rows_with_a_common_prefix_replay_too_where_it_is_little_to_read_again(
    model, replays, most_keys_of_graphs
):
    """Common: 130 tokens, so eight whole blocks, which four rows and more attend to as a group."""
    common, options = range(3, 133), {"lag": 1, "kv_tokens": 16_384, "max_context": 512}
    expected = answers(engine_of(model, graphs=False, **options), beginning=common)
    engine = engine_of(model, graphs=True, **options)
    engine._executor.graphs._most_shared_keys = most_keys_of_graphs
    assert answers(engine, beginning=common) == expected
    assert replays
    assert (engine._executor.shared > 0) == (most_keys_of_graphs > 4 * 128)
