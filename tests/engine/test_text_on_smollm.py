"""Text through the real engine and a real model."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import run

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.generate import ParsedLine, Progress, generate
from headrace.engine.request import FinishReason, SamplingParams
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import TextRequest
from headrace.engine.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["The capital of France is", "1, 2, 3, 4, 5,", "def add(a, b):\n", "Das Wetter ist heute", "水"]


@pytest.fixture(scope="module", params=[0, 2], ids=["lag 0", "lag 2"])
def token_engine(smollm: Path, request: pytest.FixtureRequest) -> Engine:
    config = EngineConfig(model=str(smollm), device="cpu", dtype="float32", kv_tokens=4096, lag=request.param)
    return Engine(config)


@pytest.fixture
def engine(token_engine: Engine, smollm: Path) -> Iterator[LocalTextEngine]:
    yield LocalTextEngine(token_engine, Tokenizer.load(smollm), model="smollm")
    token_engine.check()
    assert token_engine.stats().running == 0
    assert token_engine.stats().blocks_live == 0


def test_stop_strings_cut_real_text_where_it_would_have_said_them(engine: LocalTextEngine) -> None:
    plain = run(engine, [TextRequest(p, prompt=p, sampling=GREEDY) for p in PROMPTS])
    texts = {p: plain[p].choices[0].text for p in PROMPTS}
    stops = {p: text[n : n + 4] for p, text in texts.items() for n in [len(text) // 2]}
    stops[PROMPTS[1]] = texts[PROMPTS[1]][:3]
    cut = run(
        engine, [TextRequest(p, prompt=p, sampling=GREEDY, stop=("\0never", stops[p])) for p in PROMPTS]
    )
    for p in PROMPTS:
        choice = cut[p].choices[0]
        assert choice.text == texts[p].partition(stops[p])[0]
        assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, stops[p])
        assert (choice.token_ids == []) == (choice.text == "")
        assert choice.token_ids == plain[p].choices[0].token_ids[: len(choice.token_ids)]


def test_a_mixed_batch_answers_each_as_asked(engine: LocalTextEngine) -> None:
    chat = [{"role": "user", "content": "Say hello."}]
    sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=8)
    ended = run(
        engine,
        [
            TextRequest("greedy", prompt=PROMPTS[0], sampling=GREEDY),
            TextRequest("sampled", prompt=PROMPTS[0], sampling=sampled),
            TextRequest("twin", prompt=PROMPTS[0], sampling=sampled),
            TextRequest("chat", messages=chat, sampling=GREEDY),
            TextRequest("empty", prompt=""),
            TextRequest("long", prompt="water " * 5000),
            TextRequest("hot", prompt="a", sampling=SamplingParams(temperature=9)),
        ],
    )
    assert ended["greedy"].choices[0].text.startswith(" Paris")
    assert "hello" in ended["chat"].choices[0].text.lower()
    assert ended["sampled"].choices[0].text == ended["twin"].choices[0].text, "same seed, same prompt"
    assert {n: c.error.param for n, c in ended.items() if c.error} == {
        "empty": "prompt",
        "long": "prompt",
        "hot": "temperature",
    }


def test_a_running_request_is_aborted_with_what_it_said(engine: LocalTextEngine) -> None:
    endless = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    engine.add_many([TextRequest("endless", prompt="Once", sampling=endless, stop=("\0never",))])
    assert engine.poll(0.0) == []
    while engine.stats().generated_tokens == 0:
        engine.poll(0.0)
    engine.abort(["endless"])
    (ended,) = engine.poll(60.0)
    assert ended.choices[0].finish_reason is FinishReason.ABORT
    assert ended.completion_tokens < 2000


def test_a_file_is_stopped_and_taken_up_again(engine: LocalTextEngine, tmp_path: Path) -> None:
    source, out, stop = tmp_path / "in.jsonl", tmp_path / "out.jsonl", threading.Event()
    source.write_text("".join(json.dumps({"prompt": f"Line {n}:"}) + "\n" for n in range(1, 41)))

    def parse(data: bytes, number: int) -> ParsedLine:
        prompt = json.loads(data)["prompt"]
        return ParsedLine(
            TextRequest("any", prompt=prompt, sampling=SamplingParams(temperature=0, max_tokens=2))
        )

    def stop_early(progress: Progress) -> None:
        if progress.done >= 8:
            stop.set()

    first = generate(source, out, engine, parse, max_in_flight=8, on_progress=stop_early, stop=stop)
    assert first.stopped
    second = generate(source, out, engine, parse, resume=True)
    assert first.done + second.done == 40
    assert sorted(json.loads(line)["line"] for line in out.read_bytes().splitlines()) == list(range(1, 41))
