"""Every option from the line that asks to the line that answers, through a real engine: our form and OpenAI's alike."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny_model
from asking_lines import run_lines
from small_tokenizers import small

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import SamplingParams
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import TextRequest
from headrace.engine.tokenizer import Tokenizer
from headrace.worker import translate

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(smollm: Path) -> LocalTextEngine:
    config = EngineConfig(model=str(smollm), device="cpu", dtype="float32", kv_tokens=4096, lag=1)
    return LocalTextEngine(Engine(config), Tokenizer.load(smollm))


def answers(engine: LocalTextEngine, *options: dict[str, Any], openai: bool = False) -> list[dict[str, Any]]:
    """The lines that answer PROMPT with each of these options, all in one batch."""
    lines: list[dict[str, Any]] = [
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": PROMPT, **GREEDY, **option}}
        if openai
        else {"prompt": PROMPT, "sampling": GREEDY | option}
        for option in options
    ]
    return [translate.write_line(job, done, "m") for job, done in run_lines(engine, lines)]


def texts(line: dict[str, Any]) -> list[str]:
    assert line["state"] == "succeeded", line
    return [choice["text"] for choice in line["choices"]]


@pytest.mark.parametrize("openai", [False, True], ids=["ours", "openai"])
def test_a_mixed_batch_gives_each_line_what_it_asks_for(
    engine: LocalTextEngine, smollm: Path, openai: bool
) -> None:
    tokenizer = Tokenizer.load(smollm)
    (paris,), (london,) = tokenizer.encode_rendered([" Paris"]), tokenizer.encode_rendered([" London"])
    (alone,) = texts(answers(engine, {})[0])
    assert alone.startswith(" Paris")
    lines = answers(
        engine,
        {},
        {"bad_words": ["Paris"]},
        {"banned_token_ids": paris},
        {"logit_bias": {str(london[0]): 100}, "max_tokens": 3},
        {"allowed_token_ids": [paris[0], london[0]], "max_tokens": 4},
        {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 1.5, "max_tokens": 24},
        {"echo": True},
        {"stop": ["."], "include_stop_str_in_output": True},
        {"truncate_prompt_tokens": 2, "skip_special_tokens": False},
        {"logprobs": 3},
        {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 16},
        {"min_tokens": 12},
        openai=openai,
    )
    plain, without, banned, biased, allowed, penalised, echoed, stopped, cut, likely, several, long = lines
    assert texts(plain) == [alone]
    assert "Paris" not in texts(without)[0]
    assert not texts(banned)[0].startswith(" Paris")
    assert texts(biased) == [" London London London"]
    assert set(texts(allowed)[0].split()) <= {"Paris", "London"}
    assert texts(penalised) != [alone]
    assert texts(echoed) == [PROMPT + alone]
    assert texts(stopped) == [alone.partition(".")[0] + "."]
    assert cut["usage"]["prompt_tokens"] == 2
    assert texts(likely) == [alone]
    tokens = likely["choices"][0]["logprobs"]
    assert "".join(token["token"] for token in tokens) == alone
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in tokens), (
        "greedy is the likeliest"
    )
    assert {len(token["top_logprobs"]) for token in tokens} == {3}
    assert len(set(texts(several))) == 3
    assert several["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert several["usage"]["completion_tokens"] > plain["usage"]["completion_tokens"]
    assert long["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    "line",
    [
        {"prompt_token_ids": [5] * 50, "sampling": {"ignore_eos": True}},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [5] * 50, "ignore_eos": True}},
    ],
    ids=["ours", "openai"],
)
def test_an_answer_without_a_limit_takes_what_the_context_leaves(
    line: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = small("byte_level")
    path = tiny_model.write(tmp_path, vocab_size=len(tokenizer.pieces()))
    config = EngineConfig(model=path, weights="random", device="cpu", kv_tokens=128, max_context=64)
    engine = LocalTextEngine(Engine(config), tokenizer)
    request, job = translate.read_line(orjson.dumps(line), 1)
    assert isinstance(request, TextRequest)
    engine.add_many([request])
    answer = translate.write_line(job, engine.poll(60.0)[0], "m")
    assert answer["usage"]["completion_tokens"] == 64 - 50
    assert answer["choices"][0]["finish_reason"] == "length"


def test_several_answers_share_their_prompts_blocks(engine: LocalTextEngine) -> None:
    hits = engine._engine.stats().prefix_hits
    words = " ".join(f"word{n}" for n in range(60))
    engine.add_many([TextRequest("x", prompt=words, n=4, sampling=SamplingParams(max_tokens=2))])
    while not (ended := engine.poll(60.0)):
        pass
    full = (ended[0].prompt_tokens - 1) // 32 * 32
    assert full > 0
    assert engine._engine.stats().prefix_hits - hits == 3 * full


def test_log_probabilities_are_those_of_transformers(engine: LocalTextEngine, smollm: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (line,) = answers(engine, {"logprobs": 5, "repetition_penalty": 1.5})
    ours = line["choices"][0]["logprobs"]
    ids = [token["token_id"] for token in ours]
    prompt = Tokenizer.load(smollm).encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for token, row in zip(ours, expected, strict=True):
        assert token["logprob"] == pytest.approx(row[token["token_id"]].item(), abs=1e-3)
        likeliest = [other["logprob"] for other in token["top_logprobs"]]
        assert likeliest == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
