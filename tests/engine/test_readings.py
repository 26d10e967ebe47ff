"""What is read off a prompt (log-probabilities, pooled vectors) is what Transformers gives, whatever the engine does.

SmolLM2-135M-Instruct in fp32.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headrace.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams, prompt_reading
from headrace.engine.errors import InvalidRequest
from headrace.engine.request import Completion, Logprobs, Outputs, Pooling

TOLERANCE = 1e-3
BLOCK = 32
TEXT = Path(__file__).parents[2] / "LICENSE"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(smollm: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(smollm: Path) -> list[list[int]]:
    """Prompts of 1 to 70 tokens, at and beside the ends of blocks; some begin alike."""
    ids: list[int] = AutoTokenizer.from_pretrained(smollm)(TEXT.read_text())["input_ids"]
    return [ids[300:301], ids[311:313], ids[: BLOCK - 1], ids[:BLOCK], ids[: BLOCK + 1], ids[400:470]]


@pytest.fixture
def engine(request: pytest.FixtureRequest, smollm: Path) -> Iterator[Engine]:
    """An fp32 engine; the indirect parameter gives what differs from a roomy one."""
    options = {"block_size": BLOCK, "kv_tokens": 4096} | getattr(request, "param", {})
    engine = Engine(EngineConfig(model=str(smollm), device="cpu", dtype="float32", **options))
    yield engine
    assert not engine.has_work
    engine.check()
    assert engine.stats().blocks_live == 0
    engine.close()


def run(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    requests = list(requests)
    engine.add_many(requests)
    done = {completion.id: completion for completion in until_idle(engine)}
    return [done[request.id] for request in requests]


def until_idle(engine: Engine) -> Iterator[Completion]:
    while engine.has_work:
        yield from engine.step().completions


@torch.inference_mode()
def expect_logprobs(model: PreTrainedModel, prompt: list[int], need_from: int, logprobs: Logprobs) -> None:
    wanted = model(torch.tensor([prompt])).logits[0, need_from:-1].log_softmax(dim=-1)
    chosen = wanted.gather(1, torch.tensor(prompt[need_from + 1 :])[:, None])[:, 0]
    width = logprobs.top.shape[1]
    np.testing.assert_allclose(logprobs.chosen, chosen, atol=TOLERANCE)
    np.testing.assert_allclose(logprobs.top, wanted.topk(width).values, atol=TOLERANCE)
    named = wanted.gather(1, torch.from_numpy(logprobs.top_ids).long())
    np.testing.assert_allclose(logprobs.top, named, atol=TOLERANCE)


@torch.inference_mode()
def pooled(model: PreTrainedModel, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return {Pooling.MEAN: hidden.mean(dim=0), Pooling.LAST: hidden[-1], Pooling.CLS: hidden[0]}[pooling]


ROOMY_AND_TINY = [
    {"lag": 0},
    {"lag": 2, "max_batched_tokens": 21, "max_slots": 8, "kv_tokens": 160},
]


@pytest.mark.parametrize("engine", ROOMY_AND_TINY, ids=str, indirect=True)
def test_prompt_logprobs_are_transformers_beside_prompts_that_want_none(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    asking = [
        Request(str(i), prompt, GREEDY, need_from=0, prompt_logprobs=i % 4)
        for i, prompt in enumerate(prompts)
    ]
    plain = Request("plain", prompts[2], GREEDY)
    without, *done = run(engine, [plain, *asking])
    assert without.prompt_logprobs is None
    assert done[2].token_ids == without.token_ids
    for completion, prompt in zip(done, prompts, strict=True):
        assert completion.cached_tokens == 0
        expect_logprobs(model, prompt, 0, completion.prompt_logprobs)


@pytest.mark.parametrize("engine", ROOMY_AND_TINY, ids=str, indirect=True)
def test_scored_continuations_share_what_lies_before_them(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    context, ends = prompts[5][:36], [prompts[1], prompts[2][:20], prompts[2][:5], prompts[0]]
    requests = [
        Request(str(i), context + end, outputs=Outputs.LOGPROBS, need_from=35, prompt_logprobs=1)
        for i, end in enumerate(ends)
    ]
    done = run(engine, requests)
    assert sum(completion.cached_tokens for completion in done) == 3 * BLOCK
    for completion, end in zip(done, ends, strict=True):
        assert completion.token_ids == []
        assert len(completion.prompt_logprobs.chosen) == len(end)
        expect_logprobs(model, context + end, 35, completion.prompt_logprobs)


@pytest.mark.parametrize("engine", ROOMY_AND_TINY, ids=str, indirect=True)
def test_vectors_are_pooled_from_transformers_hidden_states(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    asked = [*zip(prompts, itertools.cycle(Pooling)), (prompts[5], Pooling.MEAN)]
    requests = [
        Request(str(i), prompt, outputs=Outputs.VECTOR, pooling=pooling)
        for i, (prompt, pooling) in enumerate(asked)
    ]
    for completion, (prompt, pooling) in zip(run(engine, requests), asked, strict=True):
        assert completion.token_ids == []
        np.testing.assert_allclose(
            completion.vector, pooled(model, prompt, pooling), atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize(
    "engine",
    [{"lag": lag, "kv_tokens": 128, "max_batched_tokens": 20, "max_slots": 8} for lag in (0, 1, 2)],
    ids=str,
    indirect=True,
)
def test_readings_survive_a_preemption_in_the_middle_of_the_prompt(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    long = prompts[5]
    for victim, newcomer in (
        (Request("logprobs", long, GREEDY, priority=1, need_from=0, prompt_logprobs=2), long[::-1]),
        (Request("vector", long, priority=1, outputs=Outputs.VECTOR, pooling=Pooling.MEAN), long[1:]),
    ):
        engine.add_many([victim])
        engine.step()
        engine.step()  # two chunks are launched, the rest is not
        engine.add_many([Request("newcomer", newcomer, GREEDY)])
        done = {completion.id: completion for completion in until_idle(engine)}
        assert done[victim.id].preemptions == 1
        if victim.outputs is Outputs.VECTOR:
            np.testing.assert_allclose(
                done["vector"].vector, pooled(model, long, Pooling.MEAN), atol=TOLERANCE, rtol=TOLERANCE
            )
        else:
            expect_logprobs(model, long, 0, done["logprobs"].prompt_logprobs)


def test_logits_of_a_long_prompt_are_never_in_memory_together(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    monkeypatch.setattr(prompt_reading, "LOGITS_AT_ONCE", 16)
    own = engine._executor.runner.model
    rows: list[int] = []
    logits = own.logits
    monkeypatch.setattr(own, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    (done,) = run(engine, [Request("long", prompts[5], GREEDY, need_from=0)])
    assert max(rows) == 16
    assert sum(rows) == 69 + 4
    expect_logprobs(model, prompts[5], 0, done.prompt_logprobs)


def tiny(tmp_path: Path, **options: object) -> Engine:
    config = {"weights": "random", "device": "cpu", "dtype": "float32", "kv_tokens": 512} | options
    return Engine(EngineConfig(model=tiny_model.write(tmp_path), **config))


def test_a_prompt_that_is_only_looked_at_may_fill_the_context(tmp_path: Path) -> None:
    engine = tiny(tmp_path, max_context=64)
    prompt = [3 + i % 200 for i in range(64)]
    scored, vector = run(
        engine,
        [
            Request("scored", prompt, outputs=Outputs.LOGPROBS, need_from=10),
            Request("vector", prompt, outputs=Outputs.VECTOR, pooling=Pooling.MEAN),
        ],
    )
    assert len(scored.prompt_logprobs.chosen) == 53
    assert vector.vector.shape == (64,)
    assert engine.stats().generated_tokens == 0
    with pytest.raises(InvalidRequest, match="at most 64 fit"):
        engine.add_many([Request("long", [*prompt, 3], outputs=Outputs.VECTOR)])


def test_nothing_is_read_where_no_token_of_the_prompt_follows(tmp_path: Path) -> None:
    engine = tiny(tmp_path)
    one, last = run(
        engine, [Request("1", [5], GREEDY, need_from=0), Request("2", [5, 6, 7], GREEDY, need_from=2)]
    )
    assert len(one.prompt_logprobs.chosen) == len(last.prompt_logprobs.chosen) == 0
    assert len(one.token_ids) == len(last.token_ids) == 4


@pytest.mark.parametrize("outputs", Outputs)
def test_an_aborted_request_has_read_nothing(tmp_path: Path, outputs: Outputs) -> None:
    engine = tiny(tmp_path, lag=2)
    need_from = None if outputs is Outputs.VECTOR else 0
    engine.add_many([Request("1", [5] * 40, GREEDY, outputs=outputs, need_from=need_from)])
    engine.step()
    engine.abort("1")
    (done,) = engine.step().completions
    assert done.finish_reason is FinishReason.ABORT
    assert done.prompt_logprobs is done.vector is None
    while engine.has_work:
        engine.step()
    engine.check()


def test_what_contradicts_itself_is_refused_by_name(tmp_path: Path) -> None:
    engine = tiny(tmp_path)
    for request, param in (
        (Request("1", [5, 6], need_from=2), "need_from"),
        (Request("1", [5, 6], need_from=-1), "need_from"),
        (Request("1", [5, 6], outputs=Outputs.LOGPROBS), "need_from"),
        (Request("1", [5, 6], outputs=Outputs.VECTOR, need_from=0), "need_from"),
        (Request("1", [5, 6], need_from=0, prompt_logprobs=21), "prompt_logprobs"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            engine.add_many([request])
        assert refused.value.param == param
