"""Jobs that look at their prompts, from the line that asks to the line that answers, as Transformers has the numbers."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from asking import run
from asking_lines import run_lines
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import TextRequest
from headrace.engine.tokenizer import Tokenizer
from headrace.schemas import JobResult
from headrace.worker import translate

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 4}
CHAT = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def engine(smollm: Path) -> LocalTextEngine:
    config = EngineConfig(model=str(smollm), device="cpu", dtype="float32", kv_tokens=2048, lag=1)
    return LocalTextEngine(Engine(config), Tokenizer.load(smollm))


@pytest.fixture(scope="module")
def tokenizer(smollm: Path) -> Tokenizer:
    return Tokenizer.load(smollm)


@pytest.fixture(scope="module")
def model(smollm: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)


def results(engine: LocalTextEngine, *lines: dict[str, Any]) -> list[JobResult]:
    """What answers these lines, all in one batch."""
    ended = run_lines(engine, lines)
    for _, done in ended:
        assert done.error is None, done.error
    answered = [translate.succeeded(job, done, model="m") for job, done in ended]
    assert [JobResult.decode(result.encode()) for result in answered] == answered
    return answered


@torch.inference_mode()
def logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[T - 1, V]: of what may follow each token but the last."""
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)


def test_continuations_are_scored_as_harnesses_do(
    engine: LocalTextEngine, tokenizer: Tokenizer, model: PreTrainedModel
) -> None:
    texts = [" Paris", " London", " the city of light, Paris."]
    ids = [tokenizer.encode_rendered([text])[0] for text in texts]
    prompt = tokenizer.encode(PROMPT)
    chat = tokenizer.encode_rendered([tokenizer.render_chat(CHAT)])[0]
    by_text, by_ids, after_chat = results(
        engine,
        {"prompt": PROMPT, "continuations": texts},
        {"prompt_token_ids": prompt, "continuations": [ids[0], texts[1], ids[2]]},
        {"messages": CHAT, "continuations": ["Hello!"]},
    )
    assert by_text.scores == by_ids.scores
    hello = tokenizer.encode_rendered(["Hello!"])[0]
    asked = [(prompt, end, score) for end, score in zip(ids, by_text.scores or (), strict=True)]
    for before, end, score in [*asked, (chat, hello, (after_chat.scores or ())[0])]:
        wanted = logprobs(model, before + end)[len(before) - 1 :]
        chosen = wanted.gather(1, torch.tensor(end)[:, None])[:, 0]
        assert score.logprob == pytest.approx(chosen.sum().item(), abs=1e-3)
        assert score.tokens == len(end)
        assert score.is_greedy == (wanted.argmax(dim=-1).tolist() == end)
    assert [score.index for score in by_text.scores or ()] == [0, 1, 2]
    assert by_text.scores[0].is_greedy
    assert not by_text.scores[1].is_greedy
    assert by_text.choices == []
    assert by_text.usage.prompt_tokens == len(prompt) + sum(map(len, ids))
    assert by_text.usage.completion_tokens == 0
    body = by_text.to_openai()["response"]["body"]
    assert [item["is_greedy"] for item in body["data"]] == [True, False, False]


def test_embeddings_are_pooled_hidden_states_in_openais_shape(
    engine: LocalTextEngine, tokenizer: Tokenizer, model: PreTrainedModel
) -> None:
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokenizer.encode(PROMPT)])).last_hidden_state[0]
    line = {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": PROMPT, "encoding_format": "base64"}}
    as_is, unit, packed = results(
        engine,
        {"prompt": PROMPT, "embedding": {"pooling": "mean", "normalize": False}},
        {"prompt": PROMPT, "embedding": {"pooling": "cls"}},
        line,
    )
    np.testing.assert_allclose(as_is.embedding, hidden.mean(dim=0), atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(unit.embedding, hidden[0] / hidden[0].norm(), atol=1e-4)
    body = packed.to_openai()["response"]["body"]
    assert body["object"] == "list"
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    (data,) = body["data"]
    values = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
    np.testing.assert_allclose(values, hidden[-1] / hidden[-1].norm(), atol=1e-4)


def test_several_inputs_have_the_vectors_that_each_has_alone(
    engine: LocalTextEngine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT)
    url, options = "/v1/embeddings", {"pooling": "mean", "truncate_prompt_tokens": 4}
    line = {"custom_id": "c", "url": url, "body": {"input": [PROMPT, "Hello", ids], **options}}
    first, second, together = results(
        engine,
        {"custom_id": "c", "url": url, "body": {"input": PROMPT, **options}},
        {"custom_id": "c", "url": url, "body": {"input": ["Hello"], **options}},
        line,
    )
    assert together.embedding is None
    for vector, alone in zip(together.embeddings or (), (first, second, first), strict=True):
        np.testing.assert_allclose(vector, alone.embedding, atol=1e-4)
    body = together.to_openai()["response"]["body"]
    assert [(data["object"], data["index"]) for data in body["data"]] == [("embedding", n) for n in range(3)]
    assert [data["embedding"] for data in body["data"]] == together.embeddings
    assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_an_input_that_cannot_be_read_fails_its_own_job_and_is_named(engine: LocalTextEngine) -> None:
    lines = [["a", "b " * 9000], ["a", [1, 99_999]], ["a", "b"]]
    ended = run_lines(
        engine,
        [{"custom_id": "c", "url": "/v1/embeddings", "body": {"input": line}} for line in lines],
    )
    told = [translate.to_error(done.error, job) for job, done in ended if done.error is not None]
    assert [(error.code, error.param) for error in told] == [
        ("context_length_exceeded", "body.input.1"),
        ("invalid_value", "body.input.1.1"),
    ]
    assert len(ended[2][1].vectors or ()) == 2


def test_a_prompt_s_log_probabilities_come_beside_the_answers_and_echoed_before_them(
    engine: LocalTextEngine, tokenizer: Tokenizer, model: PreTrainedModel
) -> None:
    plain, asked, chat, echoed = results(
        engine,
        {"prompt": PROMPT, "sampling": GREEDY},
        {"prompt": PROMPT, "sampling": GREEDY | {"prompt_logprobs": 2}},
        {"messages": CHAT, "sampling": GREEDY | {"prompt_logprobs": 0}},
        {"prompt": PROMPT, "sampling": GREEDY | {"echo": True, "logprobs": 1, "n": 2}},
    )
    prompt = tokenizer.encode(PROMPT)
    expected = logprobs(model, prompt)
    first, *rest = asked.prompt_logprobs or ()
    assert (first.token_id, first.logprob, first.top_logprobs) == (prompt[0], None, [])
    for token, row in zip(rest, expected, strict=True):
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-3)
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(
            row.topk(2).values.tolist(), abs=1e-3
        )
    assert plain.prompt_logprobs is None
    assert asked.choices == plain.choices
    assert {len(token.top_logprobs) for token in chat.prompt_logprobs or ()} == {0}
    one, two = echoed.choices
    assert one.text == two.text == PROMPT + plain.choices[0].text
    for choice in (one, two):
        tokens = choice.logprobs or []
        assert "".join(token.token for token in tokens) == choice.text
        assert [token.logprob for token in tokens[: len(prompt)]] == [
            token.logprob for token in (first, *rest)
        ]
    body = echoed.to_openai()["response"]["body"]["choices"][1]["logprobs"]
    assert body["token_logprobs"][0] is body["top_logprobs"][0] is None
    assert len(body["tokens"]) == len(prompt) + 4
    listed = asked.to_openai()["response"]["body"]["choices"][0]["prompt_logprobs"]
    assert listed[0] is None
    assert listed[1][str(prompt[1])]["logprob"] == rest[0].logprob


def test_a_bad_continuation_fails_its_own_job(engine: LocalTextEngine) -> None:
    ended = run(
        engine,
        [
            TextRequest("long", prompt="x", continuations=[" y", " z" * 9000]),
            TextRequest("good", prompt="x", continuations=[" y"]),
        ],
    )
    error = ended["long"].error
    assert error is not None
    assert (error.code, error.param) == ("context_length_exceeded", "continuations[1]")
    assert ended["good"].scores is not None


def test_a_text_that_melts_into_the_prompts_last_token_is_no_continuation(engine: LocalTextEngine) -> None:
    engine.add_many([TextRequest("x", prompt="x", continuations=["y"])])
    (done,) = engine.poll(60.0)
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("invalid_value", "continuations[0]")


def test_an_aborted_look_says_so(engine: LocalTextEngine) -> None:
    engine.add_many([TextRequest("x", prompt=PROMPT, continuations=[" a", " b"])])
    engine.abort(["x"])
    while not (ended := engine.poll(60.0)):
        pass
    assert ended[0].aborted
    assert ended[0].scores is None


@pytest.mark.parametrize(
    ("line", "cost"),
    [
        ({"prompt": "x" * 40, "embedding": {}}, 11),
        ({"prompt": "x" * 40, "continuations": ["y" * 8, [1, 2, 3]]}, 16),
        ({"inputs": ["x" * 40, [1, 2, 3]], "embedding": {}}, 14),
        (
            {"inputs": ["x" * 40, [1, 2, 3]], "embedding": {}, "sampling": {"truncate_prompt_tokens": 2}},
            5,
        ),
    ],
)
def test_admission_charges_a_look_what_it_computes(line: dict[str, Any], cost: int) -> None:
    _, job = translate.read_line(orjson.dumps(line), 1)
    assert translate.cost(job) == cost
