"""A sequence of which the model computes no finite numbers fails alone: with a code, and nobody takes over what it left."""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_model
import torch
from asking import run as run_text
from fake_graphs import FakeGraph, with_all_graphs
from small_tokenizers import small
from torch import Tensor

from headrace.engine import Completion, Engine, EngineConfig, FinishReason, Request, SamplingParams
from headrace.engine.build import build
from headrace.engine.generate import ParsedLine, generate
from headrace.engine.request import Outputs, Pooling
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import TextRequest

BAD = 4
"""The token whose embedding is NaN; as an output it is like any other."""

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLINGS = [
    GREEDY,
    *(
        SamplingParams(max_tokens=12, seed=7, ignore_eos=True, **options)
        for options in (
            {"temperature": 0, "logprobs": 2},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 5, "logprobs": 0},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.5, "min_p": 0.05},
            {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
            {"temperature": 0, "logit_bias": ((9, 3.0),), "bad_words": ((5, 6),), "logprobs": 1},
            {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 40)), "min_tokens": 4},
        )
    ),
]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.write(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


def engine_of(model: str, *, graphs: bool = False, **options: object) -> Engine:
    defaults = {"kv_tokens": 2048, "max_slots": 8, "block_size": 16, "max_context": 256}
    config = EngineConfig(
        model=model, weights="random", dtype="float32", device="cpu", **(defaults | options)
    )
    parts = build(config)
    parts.executor.runner.model.embedding.weight[BAD] = float("nan")
    engine = Engine(config, parts)
    if graphs:
        engine._executor = with_all_graphs(parts.executor)
    return engine


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Completion]:
    """All completions by id. The requests arrive a few at each step."""
    waiting, done = list(requests)[::-1], {}
    while waiting or engine.has_work:
        engine.add_many([waiting.pop() for _ in range(min(3, len(waiting)))])
        for completion in engine.step().completions:
            assert completion.id not in done
            done[completion.id] = completion
        engine.check()
    assert engine.stats().blocks_live == 0
    return done


def answers(name: str, bad: bool, count: int = 18) -> list[Request]:
    """Requests of every sampling, a third of which begin alike."""
    rng = random.Random(3)
    common = [rng.randrange(5, 250) for _ in range(70)]
    asked = []
    for i in range(count):
        prompt = [*(common if i % 3 else ()), *(rng.randrange(5, 250) for _ in range(rng.randrange(1, 30)))]
        if bad:
            prompt.insert(rng.randrange(len(prompt) + 1), BAD)
        asked.append(Request(f"{name} {i}", prompt, SAMPLINGS[i % len(SAMPLINGS)], stream=i % 2 == 0))
    return asked


def looks(name: str, bad: bool) -> list[Request]:
    rng = random.Random(4)
    prompt = [rng.randrange(5, 250) for _ in range(50)]
    prompt[20] = BAD if bad else 5
    return [
        Request(f"{name} scored", prompt, outputs=Outputs.LOGPROBS, need_from=30, prompt_logprobs=2),
        Request(f"{name} beside an answer", prompt, GREEDY, need_from=0),
        *(Request(f"{name} {p}", prompt, outputs=Outputs.VECTOR, pooling=p) for p in Pooling),
    ]


def failed(completion: Completion) -> bool:
    """Whether it did, with nothing to show for it."""
    if completion.error is None:
        return False
    assert completion.error.code == "non_finite_values"
    assert "HEADRACE_DTYPE" in completion.error.message
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.vector is None
    assert completion.prompt_logprobs is None
    return True


def assert_same(completion: Completion, expected: Completion) -> None:
    assert completion.error is None
    assert completion.token_ids == expected.token_ids
    assert completion.finish_reason is expected.finish_reason
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(completion, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours.chosen, theirs.chosen, atol=1e-5)
            np.testing.assert_allclose(ours.top, theirs.top, atol=1e-5)
    if expected.vector is not None:
        np.testing.assert_allclose(completion.vector, expected.vector, atol=1e-5)


@pytest.mark.parametrize(
    ("lag", "kv_tokens", "graphs", "batch_invariant"),
    [
        (0, 2048, False, False),
        (1, 192, True, False),
        (2, 2048, True, False),
        (2, 192, False, False),
        (1, 192, True, True),
    ],
)
def test_it_fails_alone_whatever_it_asks_for_and_its_neighbours_answer_as_without_it(
    untied: str, replays: list[FakeGraph], lag: int, kv_tokens: int, graphs: bool, batch_invariant: bool
) -> None:
    options = {"lag": lag, "kv_tokens": kv_tokens, "graphs": graphs, "max_batched_tokens": 48}
    options["batch_invariant"] = batch_invariant
    good = [*answers("good", bad=False), *looks("good", bad=False)]
    bad = [*answers("bad", bad=True), *looks("bad", bad=True)]
    expected = run(engine_of(untied, **options), good)
    both = good + bad
    random.Random(1).shuffle(both)
    engine = engine_of(untied, **options)
    done = run(engine, both)
    assert {name for name, completion in done.items() if failed(completion)} == {r.id for r in bad}
    assert (engine.stats().preemptions > 0) == (kv_tokens == 192)
    assert (len(replays) > 0) == graphs
    for request in good:
        assert_same(done[request.id], expected[request.id])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_it_fails_alone_in_an_engine_of_its_own(untied: str, lag: int) -> None:
    engine = engine_of(untied, lag=lag)
    for request in [*answers("bad", bad=True), *looks("bad", bad=True)]:
        assert failed(run(engine, [request])[request.id])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_answer_that_comes_to_it_later_fails_then(untied: str, lag: int) -> None:
    says_bad = SamplingParams(temperature=0, max_tokens=9, logit_bias=((BAD, 100.0),), ignore_eos=True)
    last = SamplingParams(temperature=0, max_tokens=1, logit_bias=((BAD, 100.0),), ignore_eos=True)
    done = run(engine_of(untied, lag=lag), [Request("a", [5, 6], says_bad), Request("b", [5, 6], last)])
    assert failed(done["a"])
    assert done["a"].token_ids == done["b"].token_ids == [BAD]
    assert done["b"].finish_reason is FinishReason.LENGTH, "nothing was computed of its last token"


def test_nothing_that_it_computed_is_found_by_the_next(untied: str) -> None:
    engine = engine_of(untied)
    prompt = [5] * 32 + [BAD] + [6] * 31
    assert failed(run(engine, [Request("bad", prompt, GREEDY)])["bad"])
    assert engine.stats().blocks_cached == 0
    engine._executor.runner.model.embedding.weight[BAD] = (
        0.0  # as if it had been the device's fault, for a moment
    )
    after = run(engine, [Request("same", prompt, GREEDY)])["same"]
    assert (after.error, after.cached_tokens, len(after.token_ids)) == (None, 0, 6)


def test_what_is_read_off_a_prompt_is_looked_at_itself(untied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(untied)
    model = engine._executor.runner.model
    model.embedding.weight[BAD] = 0.0
    forward = model.forward

    def overflows_in_the_last_layer(ids: Tensor, *rest: object) -> Tensor:
        hidden = forward(ids, *rest)
        return torch.where((ids == BAD)[:, None], float("nan"), hidden)

    monkeypatch.setattr(model, "forward", overflows_in_the_last_layer)
    prompt = [5, 6, BAD, 7, 8]
    asked = [
        Request("answer", prompt, GREEDY),
        Request("scored after it", prompt, outputs=Outputs.LOGPROBS, need_from=3),
        Request("scored from it", prompt, outputs=Outputs.LOGPROBS, need_from=2),
        Request("read beside an answer", prompt, GREEDY, need_from=0),
        *(Request(str(p), prompt, outputs=Outputs.VECTOR, pooling=p) for p in Pooling),
    ]
    done = run(engine, asked)
    assert {name for name, completion in done.items() if failed(completion)} == {
        "scored from it", "read beside an answer", str(Pooling.MEAN)
    }  # fmt: skip
    assert np.isfinite(done[str(Pooling.LAST)].vector).all()


def test_a_token_that_may_not_be_chosen_anyway_spoils_the_log_probabilities_alone(untied: str) -> None:
    engine = engine_of(untied)
    engine._executor.runner.model.head.weight[BAD] = float("nan")
    allowed = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": (5, 6, 7), "ignore_eos": True}
    done = run(
        engine,
        [
            Request("may choose it", [5], GREEDY),
            Request("may not", [5], SamplingParams(**allowed)),
            Request("may not, but reports", [5], SamplingParams(**allowed, logprobs=0)),
        ],
    )
    assert {name for name, c in done.items() if failed(c)} == {"may choose it", "may not, but reports"}
    assert len(done["may not"].token_ids) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_one_damaged_weight_fails_every_prompt_wherever_it_is(untied: str, value: float) -> None:
    engine = engine_of(untied)
    weights = dict(engine._executor.runner.model.layers[0].destinations())
    assert len(weights) >= 9
    for name, weight in weights.items():
        sound = weight.clone()
        weight.view(-1)[3] = value
        for prompt in ([5], [6, 7, 8], list(range(5, 60))):
            request = Request(name, prompt, replace(GREEDY, max_tokens=1))
            assert failed(run(engine, [request])[name]), name
        weight.copy_(sound)
    assert run(engine, [Request("sound again", [5, 6, 7, 8], GREEDY)])["sound again"].error is None


# -- in text ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def text_engine(tmp_path: Path) -> LocalTextEngine:
    tokenizer = small("byte_level")
    model = tiny_model.write(tmp_path, vocab_size=len(tokenizer.pieces()), tie_word_embeddings=False)
    return LocalTextEngine(engine_of(model, kv_tokens=4096, lag=1), tokenizer)


def test_one_of_several_answers_fails_the_request_and_the_others_are_not_gone_on_with(
    text_engine: LocalTextEngine,
) -> None:
    likely = SamplingParams(
        temperature=1.0, max_tokens=200, logit_bias=((BAD, 3.0),), seed=1, ignore_eos=True
    )
    request = TextRequest("several", prompt_token_ids=[5, 6], n=3, sampling=likely)
    ended = run_text(text_engine, [request, TextRequest("other", prompt_token_ids=[5, 6], sampling=GREEDY)])
    assert ended["several"].error is not None
    assert ended["several"].error.code == "non_finite_values"
    assert ended["several"].choices == []
    assert ended["other"].error is None
    assert text_engine.stats().steps < 50


def test_a_file_s_line_fails_and_no_nan_is_written(text_engine: LocalTextEngine, tmp_path: Path) -> None:
    def parse(data: bytes, number: int) -> ParsedLine:
        sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
        return ParsedLine(
            TextRequest("", prompt_token_ids=json.loads(data), sampling=sampling, prompt_logprobs=1)
        )

    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(f"[5, 6]\n[5, {BAD}, 6]\n[7, 8]\n")
    progress = generate(lines, out, text_engine, parse)
    assert (progress.succeeded, progress.failed) == (2, 1)
    assert "NaN" not in out.read_text()
    results = {result["line"]: result for result in map(json.loads, out.read_text().splitlines())}
    assert [results[line]["state"] for line in (1, 2, 3)] == ["succeeded", "failed", "succeeded"]
    assert results[2]["error"]["code"] == "non_finite_values"
