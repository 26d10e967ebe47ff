"""examples/everything.jsonl and what is expected of each of its lines, in words that a result is held against."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = (EXAMPLES / "everything.jsonl").read_bytes().splitlines()
EXPECTED: dict[str, dict[str, Any]] = {
    line.pop("custom_id"): line
    for line in map(json.loads, (EXAMPLES / "everything.expected.jsonl").read_text().splitlines())
}
TEMPLATE = EXAMPLES / "chat.jinja"
"""The worker must have it: SmolLM2's own template knows neither tools nor thoughts."""

Result = Mapping[str, Any]


def check(results: Mapping[str, Result]) -> None:
    """Whether each line's result, by its custom id, is as expected; the message tells all that are not."""
    assert results.keys() == EXPECTED.keys()
    wrong = [
        f"{name}: {key} should be {wanted!r}: {results[name]}"
        for name, expected in EXPECTED.items()
        for key, wanted in expected.items()
        if not _holds(key, wanted, results[name], results)
    ]
    assert not wrong, "\n".join(wrong)


def _holds(key: str, wanted: Any, result: Result, results: Mapping[str, Result]) -> bool:
    if key == "state":
        return bool(result["state"] == wanted)
    if key == "error":
        error = result["error"]
        same = (error["code"], error["param"]) == (wanted["code"], wanted["param"])
        return same and error["message"].startswith(wanted.get("message", error["param"]))
    if result["state"] != "succeeded":
        return False
    if key in ("prompt_tokens", "completion_tokens"):
        return bool(result["usage"][key] == wanted)
    if key in _OF_LOOKS:
        return _OF_LOOKS[key](result, wanted)
    choices = result["choices"]
    if key == "choices":
        return len(choices) == wanted
    if key == "distinct":
        return (len(set(_texts(result))) == len(choices)) is wanted
    if key == "same_text_as":
        return _texts(result) == _texts(results[wanted])
    if key == "other_text_than":
        return _texts(result) != _texts(results[wanted])
    return all(_OF_EACH_CHOICE[key](choice, wanted) for choice in choices)


def _texts(result: Result) -> list[str]:
    return [choice["text"] for choice in result["choices"]]


def _calls(choice: Result) -> list[dict[str, Any]]:
    functions = [call["function"] for call in choice.get("tool_calls", [])]
    return [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in functions]


def _fits(text: str, schema: Any) -> bool:
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


_OF_EACH_CHOICE: dict[str, Callable[[Result, Any], bool]] = {
    "fits": lambda choice, schema: _fits(choice["text"], schema),
    "matches": lambda choice, pattern: bool(re.search(pattern, choice["text"])),
    "reasoning": lambda choice, pattern: bool(re.search(pattern, choice["reasoning_content"])),
    "finish_reason": lambda choice, wanted: choice["finish_reason"] == wanted,
    "stop_reason": lambda choice, wanted: choice.get("stop_reason") == wanted,
    "tool_calls": lambda choice, wanted: _calls(choice) == wanted,
    "top_logprobs": lambda choice, wanted: (
        {len(token["top_logprobs"]) for token in choice["logprobs"]} == {wanted}
    ),
}

_OF_LOOKS: dict[str, Callable[[Result, Any], bool]] = {
    "greedy": lambda result, wanted: [score["is_greedy"] for score in result["scores"]] == wanted,
    "embedding": lambda result, size: len(result["embedding"]) == size,
    "embeddings": lambda result, sizes: list(map(len, result["embeddings"])) == sizes,
    "prompt_logprobs": lambda result, wanted: (
        {len(token["top_logprobs"]) for token in result["prompt_logprobs"][1:]} == {wanted}
    ),
}
