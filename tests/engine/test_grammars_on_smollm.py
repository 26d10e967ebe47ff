"""Structured output of a real model, from an engine in a process of its own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from asking import run

from headrace.engine.config import EngineConfig
from headrace.engine.grammar import Grammar
from headrace.engine.request import FinishReason, SamplingParams
from headrace.engine.text import LocalTextEngine, open_text_engine
from headrace.engine.text_engine import TextRequest

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "country": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0},
        "rivers": {"type": "array", "items": {"type": "string"}},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["city", "population", "rivers", "size"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    CITY,
    {"type": "array", "items": CITY},
    {"type": "object"},
    {"type": ["number", "null"]},
]


@pytest.fixture(scope="module")
def engine(smollm: Path) -> Iterator[LocalTextEngine]:
    """Two steps ahead, with too little memory for all that is asked of it."""
    config = EngineConfig(model=str(smollm), device="cpu", dtype="float32", kv_tokens=512, lag=2)
    made = open_text_engine(config)
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_answers_have_their_forms_among_free_ones_that_are_as_they_are_alone(engine: LocalTextEngine) -> None:
    prompts = ["The largest city of France, as JSON: ", "Zurich lies at the", "1, 2, 3,"]
    greedy = SamplingParams(temperature=0, max_tokens=30)
    free = [TextRequest(f"free {n}", prompt=prompt, sampling=greedy) for n, prompt in enumerate(prompts)]
    alone = run(engine, free)
    asked: list[TextRequest] = []
    for n, schema in enumerate(SCHEMAS):
        for seed, limit in enumerate((40, 70)):
            sampling = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=limit, frequency_penalty=0.5 * seed
            )
            grammar = Grammar.json_schema(schema)
            asked.append(
                TextRequest(
                    f"json {n} {seed}",
                    prompt=prompts[0],
                    sampling=sampling,
                    grammar=grammar,
                    stop=("}", "\n"),
                    n=1 + seed % 2,
                )
            )
    sampled = SamplingParams(temperature=1.0, max_tokens=12)
    asked += [
        TextRequest(
            "choice", prompt="Is water wet?", sampling=sampled, grammar=Grammar.choice([" yes", " no"]), n=4
        ),
        TextRequest(
            "regex", prompt="Call me at", sampling=sampled, grammar=Grammar.regex(" [0-9]{3}-[0-9]{4}"), n=4
        ),
        TextRequest("bad", prompt="x", sampling=sampled, grammar=Grammar.regex("(").named("here"), n=3),
    ]
    ended = run(engine, free + asked)
    for request in free:
        assert ended[request.id].choices[0].text == alone[request.id].choices[0].text
    for n, schema in enumerate(SCHEMAS):
        for seed in range(2):
            done = ended[f"json {n} {seed}"]
            assert done.error is None, done.error
            assert len(done.choices) == 1 + seed % 2
            for choice in done.choices:
                jsonschema.validate(json.loads(choice.text), schema)
    assert {choice.text for choice in ended["choice"].choices} <= {" yes", " no"}
    assert {choice.finish_reason for choice in ended["choice"].choices} == {FinishReason.STOP}
    assert all(re.fullmatch(" [0-9]{3}-[0-9]{4}", choice.text) for choice in ended["regex"].choices)
    error = ended["bad"].error
    assert error is not None
    assert (error.code, error.param) == ("invalid_grammar", "here")
    reasons = {
        c.finish_reason for name, done in ended.items() if name.startswith("json") for c in done.choices
    }
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(done.preemptions for done in ended.values()) > 0
