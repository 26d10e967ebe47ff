"""What captured decode steps compute, replayed without a GPU: inputs padded, slots that come and go, prefixes shared."""

import random

import numpy as np
import pytest
from fake_graphs import with_all_graphs

from headrace.engine import Engine, EngineConfig, Request, SamplingParams
from headrace.engine.build import build
from headrace.engine.graphs import graph_sizes
from headrace.engine.numerics import BATCH_INVARIANT
from headrace.kernels.shared_prefix import SharedPrefixes

pytestmark = pytest.mark.usefixtures("replays")

OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": ((3, 2.0),), "bad_words": ((5,), (7, 8, 9)), "logprobs": 0},
]


def engine_of(model, *, graphs, **options):
    defaults = {"kv_tokens": 8192, "max_slots": 40, "block_size": 16, "max_context": 256}
    config = EngineConfig(
        model=model, weights="random", dtype="float32", device="cpu", **(defaults | options)
    )
    parts = build(config)
    engine = Engine(config, parts)
    if graphs:
        engine._executor = with_all_graphs(parts.executor)
    return engine


def requests(count=45):
    """Some begin alike for longer than it takes to attend to a prefix together."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 250) for _ in range(150)]
    asked = []
    for i in range(count):
        own = [rng.randrange(3, 250) for _ in range(rng.choice([1, 5, 16, 17, 40]))]
        params = {"temperature": 0.0, "seed": i, "max_tokens": rng.randrange(1, 30), "ignore_eos": True}
        asked.append(
            Request(f"r{i}", shared + own if i % 3 else own, SamplingParams(**params | OPTIONS[i % 5]))
        )
    return asked


def told(engine, waiting):
    """What each request got, a few of them added at each step: tokens, and log-probabilities where wanted."""
    done, waiting = {}, list(waiting)
    while waiting or engine.has_work:
        if waiting:
            engine.add_many([waiting.pop() for _ in range(min(3, len(waiting)))])
        done |= {completion.id: completion for completion in engine.step().completions}
    engine.check()
    return done


@pytest.mark.parametrize(("lag", "kv_tokens"), [(0, 8192), (2, 640), (1, 640), (2, 8192)])
def test_tokens_and_logprobs_are_those_of_plain_steps(model, replays, lag, kv_tokens):
    options = {"lag": lag, "kv_tokens": kv_tokens, "max_batched_tokens": 200}
    expected = told(engine_of(model, graphs=False, **options), requests())
    engine = engine_of(model, graphs=True, **options)
    done = told(engine, requests())
    for name, one in expected.items():
        assert done[name].token_ids == one.token_ids
        if one.logprobs is not None:
            np.testing.assert_allclose(done[name].logprobs.chosen, one.logprobs.chosen, atol=1e-5)
            np.testing.assert_allclose(done[name].logprobs.top, one.logprobs.top, atol=1e-5)
    assert len({len(graph.results[0]) for graph in replays}) > 4, "several sizes of graphs were used"
    assert (engine.stats().preemptions > 0) == (kv_tokens == 640)
    if kv_tokens > 640:
        assert engine._executor.shared, "no step shared a prefix"


def test_batch_invariant_graphs_give_the_bits_of_plain_steps(model, replays):
    options = {"batch_invariant": True, "lag": 1, "kv_tokens": 640, "max_batched_tokens": 200}
    expected = told(engine_of(model, graphs=False, **options), requests())
    done = told(engine_of(model, graphs=True, **options), requests())
    assert replays
    for name, one in expected.items():
        assert done[name].token_ids == one.token_ids
        if one.logprobs is not None:
            assert done[name].logprobs.chosen.tobytes() == one.logprobs.chosen.tobytes()


def test_a_graph_of_batch_invariant_steps_shares_no_prefixes(model):
    engine = engine_of(model, graphs=True, batch_invariant=True)
    graphs = engine._executor.graphs
    assert graphs.runner.model.numerics is BATCH_INVARIANT
    assert {shared for _, shared in graphs._captured} == {False}


@pytest.mark.parametrize("largest", [1, 2, 5, 40, 64, 65, 256, 300, 2048])
def test_every_number_of_rows_has_a_graph_that_is_not_much_larger(largest):
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for rows in range(1, largest + 1):
        size = min(size for size in sizes if size >= rows)
        assert size - rows <= max(rows // 3, 64) if rows >= 64 else size - rows <= max(rows / 2, 1)


def test_a_step_takes_a_larger_graph_where_that_is_clearly_quicker(model, monkeypatch):
    """As where a library is slow at a few numbers of rows."""
    seconds = {4: 9.0, 6: 5.0, 8: 4.9, 12: 4.9, 16: 20.0, 24: 7.0, 32: 8.0, 40: 9.0}
    monkeypatch.setattr(
        "headrace.engine.graphs.seconds_of", lambda graph: seconds.get(len(graph.results[0]), 1.0)
    )
    engine = engine_of(model, graphs=True)
    graphs = engine._executor.graphs
    assert [graphs.sizes[graphs._size_of[rows]] for rows in (1, 3, 4, 5, 8, 9, 13, 16, 17, 33, 40)] == [
        1, 3, 6, 6, 8, 12, 24, 24, 24, 40, 40,
    ]  # fmt: skip
    plain = engine_of(model, graphs=False)
    assert {name: done.token_ids for name, done in told(engine, requests()).items()} == {
        name: done.token_ids for name, done in told(plain, requests()).items()
    }


def test_every_one_of_many_small_groups_has_its_tile_in_a_graph(model, replays, monkeypatch):
    seen = []

    def shared_prefixes(lens, num_tiles, *tiles):
        start, rows, keys = (field[: int(num_tiles)].tolist() for field in tiles)
        seen.append((lens.tolist(), start, rows, keys))
        return SharedPrefixes(lens, num_tiles, *tiles)

    monkeypatch.setattr("headrace.engine.graphs.SharedPrefixes", shared_prefixes)
    rng = random.Random(2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[rng.randrange(3, 250) for _ in range(140)] for _ in range(24)]
    asked = [Request(f"{i}-{j}", prompt, params) for i, prompt in enumerate(prompts) for j in range(4)]
    told(engine_of(model, graphs=True, max_slots=96), asked)
    assert ([128] * 96, list(range(0, 96, 4)), [4] * 24, [128] * 24) in seen


@pytest.mark.parametrize(("least", "together"), [(4 * 128, True), (4 * 128 + 1, False)])
def test_rows_attend_to_their_prefix_together_where_it_is_enough_to_read_again(
    model, replays, least, together
):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    asked = [Request(str(i), [*range(3, 143), 150 + i], params) for i in range(4)]
    expected = told(engine_of(model, graphs=False), asked)
    engine = engine_of(model, graphs=True)
    graphs = engine._executor.graphs
    graphs._least_shared_keys = least
    done = told(engine, asked)
    assert {name: one.token_ids for name, one in done.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert (
        any(captured.graph in replays for (_, shared), captured in graphs._captured.items() if shared)
        == together
    )
