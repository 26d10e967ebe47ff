"""Put lines of a file to a text engine, all at once, and hear how the job of each ends."""

from collections.abc import Sequence
from typing import Any

import orjson
from asking import run

from headrace.engine.text_engine import TextCompletion, TextEngine, TextRequest
from headrace.schemas import PromptJob
from headrace.worker import translate


def run_lines(engine: TextEngine, lines: Sequence[dict[str, Any]]) -> list[tuple[PromptJob, TextCompletion]]:
    """The job that each line is, and how it ended, in their order. None may be refused as it is read."""
    jobs, requests = [], []
    for number, line in enumerate(lines):
        request, job = translate.read_line(orjson.dumps(line), number)
        assert isinstance(request, TextRequest), request
        assert isinstance(job, PromptJob)
        requests.append(request)
        jobs.append(job)
    ended = run(engine, requests)
    return [(job, ended[request.id]) for job, request in zip(jobs, requests, strict=True)]
