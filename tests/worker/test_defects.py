"""A defect of ours costs the job that meets it, never its worker or its neighbours."""

import json
from typing import Any

import pytest
from pipeline import Pipeline

from headrace.schemas import ErrorCode
from headrace.worker import attempts, translate

SECRET = "a secret"


def broken_for(prompt: str, function: Any) -> Any:
    """The function as it is, but for jobs with this prompt, at which it raises what quotes them."""

    def broken(job: Any, *rest: Any, **named: Any) -> Any:
        if job.prompt == prompt:
            raise ValueError(f"what is {job.prompt} and {SECRET}?")
        return function(job, *rest, **named)

    return broken


def test_a_defect_on_the_way_into_the_engine_or_out_of_it_fails_that_job_alone(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "to_request", broken_for("odd question", attempts.to_request))
    monkeypatch.setattr(translate, "succeeded", broken_for("odd answer", translate.succeeded))
    caplog.set_level("INFO")
    worker = line.start_worker()
    asked, answered = line.submit("odd question"), line.submit("odd answer")
    plain = {line.submit(f"prompt {n}") for n in range(10)}
    line.wait_terminal(12)
    line.wait_for(lambda: line.lag() == 0)
    results = line.results(12)
    dead = {json.loads(letter.value())["prompt"] for letter in line.dead_letters(2)}
    worker.close()

    assert line.rows() == {asked: "failed", answered: "failed", **dict.fromkeys(plain, "succeeded")}
    for id in (asked, answered):
        error = results[id][0].error
        assert error is not None
        assert error.code == ErrorCode.INTERNAL_ERROR
        assert SECRET not in error.message
    assert dead == {"odd question", "odd answer"}
    assert SECRET not in caplog.text
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL") == [(0,)]
