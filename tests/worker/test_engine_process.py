"""A worker with the real engine, on the CPU."""

import copy
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from pipeline import Pipeline

from headrace.engine.config import EngineConfig
from headrace.engine.text import LocalTextEngine, open_text_engine
from headrace.engine.tokenizer import Tokenizer
from headrace.schemas import ErrorCode, topics

SHORT = {"max_tokens": 3, "temperature": 0}


def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", dtype="float32", kv_tokens=2048, max_slots=4)


def test_jobs_whose_engine_process_is_killed_are_answered_by_the_next(line: Pipeline, smollm: Path) -> None:
    pids = []

    def make() -> LocalTextEngine:
        engine = open_text_engine(config(smollm))
        pids.append(engine._engine.pid)
        return engine

    worker = line.start_worker(make)
    os.kill(pids[0], signal.SIGSTOP)  # so that it answers none before it is killed
    ids = [line.submit(f"prompt {n}", sampling=SHORT) for n in range(3)]
    line.flush()
    line.wait_for(lambda: line.states() == {"running": 3})
    os.kill(pids[0], signal.SIGKILL)
    line.wait_terminal(3)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()

    assert line.rows() == dict.fromkeys(ids, "succeeded")
    assert line.query("SELECT attempt, count(*) FROM jobs GROUP BY 1") == [(2, 3)]
    assert line.query("SELECT attempt, died, count(*) FROM attempts GROUP BY 1, 2 ORDER BY 1") == [
        (1, True, 3),
        (2, False, 3),
    ]
    assert len(pids) == 2


def test_a_job_for_which_there_is_no_memory_at_the_moment_is_answered_later(
    line: Pipeline, smollm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_many, failures = Tokenizer.encode_many, []

    def encode_large_late(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        if "large" in texts and len(failures) < 4:
            failures.append(texts)
            raise MemoryError
        return encode_many(tokenizer, texts)

    monkeypatch.setattr(Tokenizer, "encode_many", encode_large_late)
    worker = line.start_worker(lambda: open_text_engine(config(smollm), in_process=True))
    large, small = line.submit("large", sampling=SHORT), line.submit("small", sampling=SHORT)
    line.wait_terminal(2)
    worker.close()

    assert line.rows() == {large: "succeeded", small: "succeeded"}
    ((tries,),) = line.query("SELECT attempt FROM jobs WHERE id = %s", large)
    assert tries > 1
    assert line.query("SELECT attempt FROM jobs WHERE id = %s", small) == [(1,)]
    assert line.query("SELECT count(*) FROM attempts WHERE died OR ended_at IS NULL") == [(0,)]


def test_jobs_for_which_the_model_computes_no_finite_numbers_fail_alone_and_become_dead_letters(
    line: Pipeline, smollm: Path
) -> None:
    bad = Tokenizer.load(smollm).encode("wheel")[0]

    def make() -> LocalTextEngine:
        engine = open_text_engine(config(smollm), in_process=True)
        model = engine._engine._executor.runner.model
        model.embedding = copy.copy(model.head)  # which keeps its weights
        model.embedding.weight = model.head.weight.clone()
        model.embedding.weight[bad] = float("nan")
        return engine

    worker = line.start_worker(make)
    asked = (
        {"sampling": SHORT | {"logprobs": True}},
        {"sampling": {"max_tokens": 3, "n": 2, "temperature": 1}},
        {"sampling": SHORT | {"prompt_logprobs": 1}},
        {"continuations": [" turns", " stops"]},
        {"embedding": {"pooling": "mean"}},
    )
    failed = {line.submit("wheel and mill", **fields) for fields in asked}
    well = {line.submit("mill and water", **fields) for fields in asked}
    line.wait_terminal(10)
    line.wait_for(lambda: line.lag() == 0)
    results, letters = line.results(10), line.dead_letters(5)
    worker.close()

    assert line.rows() == {**dict.fromkeys(failed, "failed"), **dict.fromkeys(well, "succeeded")}
    for id in failed:
        error = results[id][0].error
        assert error is not None
        assert error.code == ErrorCode.NON_FINITE_VALUES
        assert "not finite" in error.message
        assert results[id][0].choices == []
    assert {json.loads(letter.value())["job_id"] for letter in letters} == set(map(str, failed))
    assert {dict(letter.headers())[topics.DEAD_CODE] for letter in letters} == {b"non_finite_values"}
