"""examples/prompts.jsonl is what the demo promises."""

from pathlib import Path

import orjson
import pytest

from headrace.schemas import InvalidJob, PromptJob, Source, parse_job
from headrace.schemas.batch_line import is_batch_line

LINES = (Path(__file__).parents[2] / "examples" / "prompts.jsonl").read_bytes().splitlines()
SOURCE = Source("file", 0, 0, timestamp_ms=-1)


def parse(line: bytes) -> PromptJob | InvalidJob:
    try:
        return parse_job(line, None, SOURCE)
    except InvalidJob as error:
        return error


def test_there_are_64_lines_each_with_a_name_of_its_own() -> None:
    assert len(LINES) == 64
    assert len({orjson.loads(line)["custom_id"] for line in LINES}) == 64


def test_exactly_two_are_bad_and_say_which_field() -> None:
    bad = [error for line in LINES if isinstance(error := parse(line), InvalidJob)]
    assert [error.param for error in bad] == ["sampling.temperature", "messages.0.role"]
    assert all(error.param is not None and error.param in error.message for error in bad)


def test_a_dozen_share_one_document() -> None:
    systems = [orjson.loads(line).get("messages", [{}])[0].get("content", "") for line in LINES]
    assert sum("The Alder Weir Handbook" in text for text in systems) == 12
    assert len({text for text in systems if "The Alder Weir Handbook" in text}) == 1


def test_one_is_a_line_of_openais_batch_format() -> None:
    assert sum(is_batch_line(orjson.loads(line)) for line in LINES) == 1


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_both_kinds_are_there(kind: str) -> None:
    assert sum(isinstance(job := parse(line), PromptJob) and job.kind == kind for line in LINES) >= 12


def test_answers_are_short_enough_for_two_cores() -> None:
    limits = [job.sampling.max_tokens for line in LINES if isinstance(job := parse(line), PromptJob)]
    assert all(limit is not None and limit <= 64 for limit in limits)
