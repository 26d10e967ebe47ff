"""Options that change a row's logits or report on them: as Transformers defines them, whatever happens to the row."""

import dataclasses
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiny_model
import torch
from one_step import OneSequence
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams
from headrace.engine.edits import MAX_LISTED, edits_of
from headrace.engine.errors import InvalidRequest
from headrace.engine.logit_edits import LogitEdits
from headrace.engine.staging import Staging
from headrace.kernels.sample import filtered_reference, sample

VOCAB = 60
PROMPT, ANSWER = [5, 6, 7, 5, 8], [9, 5, 9, 10, 7]


def edited(logits: torch.Tensor, params: SamplingParams, stop_ids: tuple[int, ...] = ()) -> torch.Tensor:
    """One row's logits [V] after PROMPT and ANSWER, as the engine edits them, in the last slot of three."""
    edits = edits_of(params, len(PROMPT), stop_ids)
    assert edits is not None
    table = LogitEdits(3, VOCAB, Staging(torch.device("cpu")))
    other = edits_of(SamplingParams(logit_bias=((1, 5.0),), bad_words=((1, 2), (3, 4, 5))), 1, ())
    table.set([(0, other), (2, edits)])
    said = PROMPT + ANSWER
    pages = torch.full((4, 4), -7, dtype=torch.int32)
    pages.view(-1)[4 : 4 + len(said)] = torch.tensor(said, dtype=torch.int32)
    block_tables = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 2, 3]], dtype=torch.int32)
    row, slot, length = (torch.tensor([n], dtype=torch.int32) for n in (1, 2, len(said)))
    return table.apply(torch.stack((logits * 0, logits)), row, slot, length, pages, block_tables)[0]


def transformers_edit(processor: object, logits: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([PROMPT + ANSWER]), logits[None].clone())[0]


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        (SamplingParams(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
        (SamplingParams(repetition_penalty=0.7), RepetitionPenaltyLogitsProcessor(0.7)),
        (
            SamplingParams(logit_bias=((3, 2.5), (59, -100.0))),
            SequenceBiasLogitsProcessor([[[3], 2.5], [[59], -100.0]]),
        ),
        (SamplingParams(banned_token_ids=(3, 59, 3)), SuppressTokensLogitsProcessor([3, 59])),
        (
            SamplingParams(bad_words=((4,), (10, 7, 11), (7, 12), (8, 13), (8, 9, 5, 9, 10, 7, 14))),
            NoBadWordsLogitsProcessor([[4], [10, 7, 11], [7, 12], [8, 13], [8, 9, 5, 9, 10, 7, 14]]),
        ),
    ],
    ids=["repetition", "repetition below 1", "logit bias", "banned", "bad words"],
)
def test_logits_are_edited_as_transformers_edits_them(params: SamplingParams, processor: object) -> None:
    torch.manual_seed(0)
    for _ in range(5):
        logits = torch.randn(VOCAB) * 5
        torch.testing.assert_close(edited(logits, params), transformers_edit(processor, logits))


def test_edits_together_are_transformers_processors_in_its_order() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 5
    expected = logits
    for processor in (
        SequenceBiasLogitsProcessor([[[9], 3.0], [[1], 4.0]]),
        RepetitionPenaltyLogitsProcessor(1.5),
        NoBadWordsLogitsProcessor([[20], [7, 21]]),
    ):
        expected = transformers_edit(processor, expected)
    params = SamplingParams(
        logit_bias=((9, 3.0), (1, 4.0)), repetition_penalty=1.5, bad_words=((20,), (7, 21))
    )
    torch.testing.assert_close(edited(logits, params), expected)


@pytest.mark.parametrize("min_tokens", [4, 5, 6, 7])
def test_stop_tokens_are_kept_out_until_the_answer_is_long_enough(min_tokens: int) -> None:
    logits = torch.randn(VOCAB)
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [2, 40], device="cpu")
    torch.testing.assert_close(
        edited(logits, SamplingParams(min_tokens=min_tokens), (2, 40)), transformers_edit(processor, logits)
    )


def test_frequency_and_presence_look_at_the_answer_alone() -> None:
    logits = torch.randn(VOCAB)
    counts = torch.bincount(torch.tensor(ANSWER), minlength=VOCAB)
    expected = logits - 0.4 * counts - 0.7 * (counts > 0)
    params = SamplingParams(frequency_penalty=0.4, presence_penalty=0.7)
    torch.testing.assert_close(edited(logits, params), expected)


def test_only_allowed_tokens_are_left_with_their_biases() -> None:
    logits = torch.randn(VOCAB)
    params = SamplingParams(
        allowed_token_ids=(3, 4, 5, 2), logit_bias=((4, 1.0), (30, 9.0)), bad_words=((5,),)
    )
    expected = torch.full((VOCAB,), float("-inf"))
    expected[[3, 4, 2]] = logits[[3, 4, 2]] + torch.tensor([0.0, 1.0, 0.0])
    torch.testing.assert_close(edited(logits, params), expected)
    kept = edited(logits, dataclasses.replace(params, min_tokens=9), (2, 33))
    expected[2] = float("-inf")
    torch.testing.assert_close(kept, expected)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"top_k": k} for k in (1, 10, 999, 5000)),
        *({"top_p": p} for p in (0.01, 0.5, 0.95, 0.99)),
        *({"min_p": p} for p in (0.001, 0.1, 1.0)),
        {"top_k": 20, "top_p": 0.8},
        {"min_p": 0.02, "top_k": 50, "top_p": 0.9},
    ],
    ids=str,
)
def test_filters_keep_the_tokens_that_transformers_keeps(
    options: dict[str, float], temperature: float
) -> None:
    logits = torch.randn(32, 1000, generator=torch.Generator().manual_seed(4)) * 3
    kept = filtered_reference(
        logits,
        torch.full((32,), temperature),
        torch.full((32,), options.get("top_k", 0), dtype=torch.int32),
        torch.full((32,), options.get("top_p", 1.0)),
        torch.full((32,), options.get("min_p", 0.0)),
    )
    torch.testing.assert_close(kept, warped(logits, SamplingParams(temperature, **options)).float())


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores [K, V] of logits, as Transformers' temperature and filters leave them, in this engine's order.

    In fp64: in fp32 the sum of a thousand small probabilities would decide about the token at top_p's border.
    """
    scores = logits.double() / (params.temperature or 1.0)
    for wanted, warper in (
        (params.min_p, MinPLogitsWarper), (params.top_k, TopKLogitsWarper), (params.top_p, TopPLogitsWarper),
    ):  # fmt: skip
        if wanted:
            scores = warper(wanted)(None, scores)
    return scores


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 10},
        {"min_p": 0.05},
        {"temperature": 1.4, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": ((3, 2.0), (4, -2.0))},
        {"bad_words": ((5,), (7, 8))},
        {"banned_token_ids": tuple(range(25, 60))},
        {"allowed_token_ids": tuple(range(20))},
        {"allowed_token_ids": tuple(range(30)), "repetition_penalty": 1.3, "temperature": 1.3, "top_k": 12},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_edited_logits_say(options: dict[str, object]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    params = SamplingParams(**options)
    if edits_of(params, len(PROMPT), ()):
        logits = edited(logits, params)
    probability = warped(logits[None], params)[0].softmax(-1)
    draws = 6000
    tokens = sample(
        logits.expand(draws, -1).contiguous(),
        torch.full((draws,), params.temperature or 1.0),
        torch.full((draws,), params.top_k or 0, dtype=torch.int32),
        torch.full((draws,), params.top_p or 1.0),
        torch.full((draws,), params.min_p or 0.0),
        torch.full((draws,), 11),
        torch.arange(draws),
    )
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert not counts[probability == 0].any()
    kept = probability > 0
    chi_square = ((counts[kept] - draws * probability[kept]) ** 2 / (draws * probability[kept])).sum()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("penalty", [1e-15, 1e-30, 1e-40, 1e-300])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 0.7])
def test_the_least_repetition_penalty_leaves_a_token_to_choose(penalty: float, temperature: float) -> None:
    logits = torch.linspace(-20, 20, VOCAB)
    params = SamplingParams(repetition_penalty=penalty, banned_token_ids=(5, 30), logit_bias=((9, 60.0),))
    changed = edited(logits, params)
    assert (changed < float("inf")).all()
    assert torch.equal(changed.isinf(), torch.isin(torch.arange(VOCAB), torch.tensor([5, 30])))
    one = torch.ones(1)
    chosen = sample(changed[None], one * temperature, one.int() * 0, one, one * 0, one.long(), one.long())
    assert chosen.tolist() == [9]


# -- through the engine ------------------------------------------------------------------------------------------------


def build(model: str, **options: object) -> Engine:
    defaults = {"dtype": "float32", "device": "cpu", "kv_tokens": 4096, "max_slots": 16, "block_size": 16}
    return Engine(EngineConfig(model=model, weights="random", **(defaults | options)))


def run(engine: Engine, requests: list[Request]) -> dict[str, object]:
    engine.add_many(requests)
    done = {}
    while engine.has_work:
        done |= {c.id: c for c in engine.poll(1.0).completions}
    engine.check()
    return done


PLAIN = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
KINDS = [
    PLAIN,
    dataclasses.replace(PLAIN, repetition_penalty=1.2),
    dataclasses.replace(PLAIN, temperature=1.0, top_p=0.9, frequency_penalty=0.5, presence_penalty=0.2, logprobs=3),
    dataclasses.replace(PLAIN, logit_bias=((7, 1.0),), bad_words=((7, 7), (9, 8, 7)), logprobs=0),
    dataclasses.replace(PLAIN, temperature=0.8, allowed_token_ids=tuple(range(40, 80)), repetition_penalty=1.1),
    dataclasses.replace(PLAIN, ignore_eos=False, min_tokens=30, logprobs=20),
    dataclasses.replace(PLAIN, temperature=1.0, stop_token_ids=tuple(range(3, 20)), min_tokens=9, presence_penalty=1.0),
]  # fmt: skip


def mixed_requests() -> list[Request]:
    rng = random.Random(0)
    shared = [rng.randrange(3, 250) for _ in range(40)]
    return [
        Request(
            f"r{i}", shared[: 20 * (i % 3)] + [i + 3] * (i % 5 + 1), dataclasses.replace(KINDS[i % 7], seed=i)
        )
        for i in range(28)
    ]


@pytest.fixture(scope="module")
def alone(model: str) -> dict[str, object]:
    """Each request in an engine that never has another, and no prefix to share."""
    engine = build(model, prefix_cache=False)
    return {request.id: run(engine, [request])[request.id] for request in mixed_requests()}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("kv_tokens", [4096, 320])
def test_options_survive_company_preemption_and_prefix_hits(
    model: str, alone: dict[str, object], lag: int, kv_tokens: int
) -> None:
    engine = build(model, lag=lag, kv_tokens=kv_tokens, max_batched_tokens=48, max_context=160)
    done = run(engine, mixed_requests())
    stats = engine.stats()
    assert stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (kv_tokens == 320)
    assert any(completion.finish_reason is FinishReason.STOP for completion in alone.values())
    for request_id, completion in alone.items():
        assert done[request_id].token_ids == completion.token_ids
        assert done[request_id].finish_reason is completion.finish_reason
        assert done[request_id].stop_reason == completion.stop_reason
        ours, theirs = done[request_id].logprobs, completion.logprobs
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours.chosen, theirs.chosen, atol=1e-4)
            np.testing.assert_allclose(ours.top, theirs.top, atol=1e-4)


def test_greedy_rows_beside_edited_ones_say_what_they_say_alone(model: str) -> None:
    requests = mixed_requests()
    plain = [dataclasses.replace(r, sampling=PLAIN) for r in requests if r.sampling.temperature == 0][:4]
    others = [dataclasses.replace(r, id=f"x{r.id}") for r in requests if r.sampling.temperature]
    apart, together = run(build(model), plain), run(build(model), plain + others)
    assert [together[r.id].token_ids for r in plain] == [apart[r.id].token_ids for r in plain]


def test_a_step_without_options_launches_nothing_for_them(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("launched for nobody")

    monkeypatch.setattr("headrace.engine.logit_edits.edit_logits", never)
    monkeypatch.setattr("headrace.engine.runner.logprobs", never)
    engine = build(model)
    run(engine, [Request("a", [5], PLAIN)])
    past = dataclasses.replace(PLAIN, ignore_eos=False, min_tokens=1)
    engine.add_many([Request("b", [5, 6], past)])
    with pytest.raises(AssertionError, match="launched"):
        engine.step()
    run(
        build(model), [Request("c", [5], dataclasses.replace(PLAIN, min_tokens=5))]
    )  # no stop token to keep out


def test_min_tokens_costs_nothing_once_they_are_there(model: str) -> None:
    engine = build(model)
    engine.add_many([Request("b", [5, 6], dataclasses.replace(PLAIN, ignore_eos=False, min_tokens=3))])
    edited_rows = []
    while (plan := engine._scheduler.schedule()) is not None:
        edited_rows.append(len(plan.edited))
        engine._scheduler.retire(plan, np.full(1, 9))
    assert edited_rows == [1, 1, 1] + [0] * 37


def test_what_is_kept_out_never_comes(model: str) -> None:
    free = run(build(model), [Request("a", [5, 6], PLAIN)])["a"].token_ids
    pair = tuple(free[1:3])
    kept_out = dataclasses.replace(PLAIN, bad_words=((free[0],), pair))
    said = run(build(model), [Request("a", [5, 6], kept_out)])["a"].token_ids
    assert free[0] not in said
    assert pair not in set(itertools.pairwise(said))
    allowed = dataclasses.replace(PLAIN, allowed_token_ids=(11, 12), temperature=1.0)
    assert set(run(build(model), [Request("a", [5, 6], allowed)])["a"].token_ids) == {11, 12}


def test_logprobs_are_the_log_softmax_of_the_models_own_logits(model: str) -> None:
    engine = build(model)
    params = dataclasses.replace(PLAIN, logprobs=4, repetition_penalty=2.0, logit_bias=((9, 50.0),))
    done = run(engine, [Request("a", [5, 6], params)])["a"]
    with torch.inference_mode():
        logits = OneSequence(engine._executor.runner.model, 64).logits([5, 6, *done.token_ids[:-1]])[1:]
    expected = logits.log_softmax(-1)
    assert len(done.logprobs.chosen) == len(done.token_ids) == 40
    ids = torch.tensor(done.token_ids)
    np.testing.assert_allclose(done.logprobs.chosen, expected.gather(1, ids[:, None])[:, 0], atol=1e-3)
    top = expected.topk(4)
    np.testing.assert_allclose(done.logprobs.top, top.values, atol=1e-3)
    by_id = expected.gather(1, torch.from_numpy(done.logprobs.top_ids).long())
    np.testing.assert_allclose(done.logprobs.top, by_id, atol=1e-3)


def test_logprobs_end_with_the_tokens(model: str) -> None:
    free = run(build(model), [Request("a", [5, 6], PLAIN)])["a"].token_ids
    params = dataclasses.replace(PLAIN, stop_token_ids=(free[3],), logprobs=2)
    for include, count in ((False, free.index(free[3])), (True, free.index(free[3]) + 1)):
        asked = dataclasses.replace(params, include_stop=include)
        done = run(build(model), [Request("a", [5, 6], asked)])["a"]
        assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, free[3])
        assert done.token_ids == free[:count]
        assert done.logprobs.top.shape == done.logprobs.top_ids.shape == (count, 2)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"logit_bias": ((256, 1.0),)}, "logit_bias"),
        ({"logit_bias": tuple((n, 1.0) for n in range(MAX_LISTED + 1))}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (3,), "bad_words": ((3,),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (2,), "min_tokens": 2}, "allowed_token_ids"),
        ({"allowed_token_ids": (3,), "banned_token_ids": (3,)}, "allowed_token_ids"),
        ({"banned_token_ids": (256,)}, "banned_token_ids"),
        ({"stop_token_ids": (256,), "min_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((300,),)}, "bad_words"),
        ({"bad_words": ((3,) * 17,)}, "bad_words"),
        ({"bad_words": ((3, 3),) * 257}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
    ],
    ids=str,
)
def test_options_that_cannot_be_carried_out_are_refused_by_name(
    model: str, options: dict[str, object], param: str
) -> None:
    vocab = 2048 if "logit_bias" in options and len(options["logit_bias"]) > 1 else 256
    engine = build(model) if vocab == 256 else build(tiny_model_of(vocab, model))
    with pytest.raises(InvalidRequest) as caught:
        engine.add_many([Request("a", [3], SamplingParams(**options))])
    assert caught.value.param == param
    assert param in str(caught.value)


def test_lists_do_as_tuples(model: str) -> None:
    options = {
        "stop_token_ids": (9, 12),
        "logit_bias": ((7, 5.0), (9, 2.0)),
        "banned_token_ids": (4,),
        "bad_words": ((3,), (7, 7)),
    }
    lists = {name: list(map(list, v)) if isinstance(v[0], tuple) else list(v) for name, v in options.items()}
    first, second = (SamplingParams(temperature=0, max_tokens=9, **given) for given in (options, lists))
    done = run(build(model), [Request("tuples", [5, 6], first), Request("lists", [5, 6], second)])
    assert done["tuples"].token_ids == done["lists"].token_ids


def test_an_end_token_beyond_the_vocabulary_harms_no_request_with_min_tokens(model: str) -> None:
    engine = build(tiny_model.write(Path(model).with_name("endless"), eos_token_id=[2, 256]))
    done = run(engine, [Request("a", [5, 6], SamplingParams(min_tokens=2, max_tokens=3))])["a"]
    assert 2 <= len(done.token_ids) <= 3


def tiny_model_of(vocab: int, beside: str) -> str:
    return tiny_model.write(Path(beside).with_name(f"tiny-{vocab}"), vocab_size=vocab)


def test_what_a_request_leaves_open_is_generation_configs(tmp_path: Path) -> None:
    directory = Path(tiny_model.write(tmp_path))
    greedy = {"temperature": 0.0, "repetition_penalty": 1.4, "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(greedy))
    engine = build(str(directory), max_context=64)
    explicit = SamplingParams(temperature=0, repetition_penalty=1.4, ignore_eos=True)
    own = SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.0, ignore_eos=True, seed=1)
    done = run(
        engine,
        [
            Request("open", [5, 6], SamplingParams(ignore_eos=True)),
            Request("explicit", [5, 6], explicit),
            Request("own", [5, 6], own),
        ],
    )
    assert done["open"].token_ids == done["explicit"].token_ids
    plain = build(tiny_model_of(256, str(directory)), max_context=64)
    assert done["own"].token_ids == run(plain, [Request("own", [5, 6], own)])["own"].token_ids
    assert {len(completion.token_ids) for completion in done.values()} == {62}, "what the context leaves"
