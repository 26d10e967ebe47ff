"""Results too large for a message: kept in the store, and referred to from table and topic alike."""

import json
from base64 import b64encode
from pathlib import Path
from random import Random
from typing import Any

import apache_kafka
import pytest
import s3
from confluent_kafka import Producer
from pipeline import Pipeline, RunningWorker, pipeline

from headrace.client import Client
from headrace.schemas import BatchClosed, ErrorCode, JobResult, JobState
from headrace.schemas.topics import MAX_LETTER_BYTES
from headrace.store import open_store
from headrace.worker import outcomes
from headrace.worker import worker as worker_module
from headrace.worker.publisher import Form

LONG = "long " * 2000
LIMIT = 4000
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOISE = b64encode(Random(1).randbytes(75_000))[:99_600]  # that no compression makes small


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*.json") if path.is_file()]


def stored(line: Pipeline) -> list[Any]:
    return line.query("SELECT uri, bytes, encode(sha256, 'hex') FROM results WHERE uri IS NOT NULL")


def test_a_large_result_is_kept_and_both_table_and_topic_say_where(line: Pipeline, tmp_path: Path) -> None:
    worker = line.start_worker(max_result_bytes=LIMIT, result_store=str(tmp_path))
    small, large = line.submit("short", batch_id="b"), line.submit(LONG, batch_id="b", metadata={"k": "v"})
    line.wait_terminal(2)
    results = line.results(2)
    worker.close()

    assert line.rows() == {small: "succeeded", large: "succeeded"}
    (result,) = results[large]
    assert (result.choices, result.metadata, result.usage.completion_tokens) == ([], {"k": "v"}, 4)
    reference = result.result_ref
    assert reference is not None
    assert stored(line) == [(reference.uri, reference.bytes, reference.sha256)]
    body = open_store(str(tmp_path)).read(reference.uri, reference.bytes, reference.sha256)
    whole = JobResult.decode(body)
    assert whole.choices[0].text == f"echo: {LONG}"
    assert whole.kept_at(reference) == result
    assert results[small][0].result_ref is None
    assert len(files(tmp_path)) == 1
    (table,) = line.query("SELECT body FROM results WHERE uri IS NOT NULL")
    assert "choices" not in table[0]


def test_a_bucket_keeps_large_results_and_who_follows_a_batch_reads_them_there(
    line: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.server() as told:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        store = "s3://bucket/results"
        worker = line.start_worker(max_result_bytes=LIMIT, result_store=store)
        for prompt in ("short", LONG):
            line.submit(prompt, batch_id="b")
        line.wait_terminal(2)
        line.control(BatchClosed(batch_id="b", expected=2))
        line.wait_for(lambda: line.lag() == 0)
        worker.close()
        ((uri, _, _),) = stored(line)
        assert uri.startswith(f"{store}/")
        with Client(line.bootstrap, line.topics, result_store=store) as client:
            texts = {result.choices[0].text for result in client.follow_results("b", idle_timeout=60)}
    assert texts == {"echo: short", f"echo: {LONG}"}


def test_following_a_batch_gives_large_results_whole(line: Pipeline, tmp_path: Path) -> None:
    worker = line.start_worker(max_result_bytes=LIMIT, result_store=str(tmp_path))
    for prompt in ("short", LONG):
        line.submit(prompt, batch_id="b")
    line.wait_terminal(2)
    line.control(BatchClosed(batch_id="b", expected=2))
    worker.close()

    def follow(store: Path | None) -> set[tuple[bool, str]]:
        root = None if store is None else str(store)
        with Client(line.bootstrap, line.topics, result_store=root) as client:
            found = list(client.follow_results("b", idle_timeout=120))
        assert len(found) == 2
        return {(each.result_ref is None, "".join(choice.text for choice in each.choices)) for each in found}

    assert follow(tmp_path) == {(True, "echo: short"), (True, f"echo: {LONG}")}
    assert follow(None) == {(True, "echo: short"), (False, "")}
    for file in files(tmp_path):
        file.write_bytes(b"somebody was here")
    assert follow(tmp_path) == {(True, "echo: short"), (False, "")}


def test_a_store_that_is_away_keeps_large_results_waiting_and_no_others(
    line: Pipeline, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    worker = line.start_worker(max_result_bytes=LIMIT, result_store=str(store))
    store.rmdir()
    store.write_text("in the way")
    large = {line.submit(LONG + str(n)) for n in range(5)}
    line.wait_for(lambda: worker.worker.status().finishing == 5)
    small = {line.submit(f"prompt {n}") for n in range(20)}
    line.wait_terminal(20)
    assert {id for id, state in line.rows().items() if state == "succeeded"} == small
    store.unlink()
    line.wait_terminal(25)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()

    results = line.results(25)
    assert line.rows() == dict.fromkeys(large | small, "succeeded")
    assert all(results[id][0].result_ref for id in large)
    assert len(files(store)) == len(stored(line)) == 5
    assert len(worker.engine.seen) == 25


def test_too_much_that_waits_for_the_store_lets_no_more_jobs_start(
    line: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "MOST_BYTES", LIMIT)
    store = tmp_path / "store"
    worker = line.start_worker(max_result_bytes=LIMIT, result_store=str(store))
    store.rmdir()
    store.write_text("in the way")
    line.submit(LONG)
    line.wait_for(lambda: worker.worker.status().finishing == 1)
    line.submit("short")
    line.wait_for(lambda: sum(worker.worker.status().waiting.values()) == 1)
    assert len(worker.engine.seen) == 1
    store.unlink()
    line.wait_terminal(2)
    worker.close()
    assert line.states() == {"succeeded": 2}


def test_a_stop_while_the_store_is_away_leaves_no_attempt_open(
    line: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "FLUSH_S", 0.5)
    store = tmp_path / "store"
    first = line.start_worker(max_result_bytes=LIMIT, result_store=str(store))
    store.rmdir()
    store.write_text("in the way")
    ids = {line.submit(LONG + str(n)) for n in range(3)}
    line.wait_for(lambda: first.worker.status().finishing == 3)
    first.close()
    assert line.states() == {"running": 3}
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL OR died") == [(0,)]

    store.unlink()
    second = line.start_worker(max_result_bytes=LIMIT, result_store=str(store))
    line.wait_terminal(3)
    line.wait_for(lambda: line.lag() == 0)
    second.close()
    assert line.rows() == dict.fromkeys(ids, "succeeded")
    assert len(stored(line)) == 3


def test_a_large_result_that_comes_again_is_published_again_as_it_was(line: Pipeline, tmp_path: Path) -> None:
    first = line.start_worker(max_result_bytes=LIMIT, result_store=str(tmp_path))
    id = line.submit(LONG)
    line.wait_terminal(1)
    line.results(1)
    first.close()
    line.forget_offsets("standard")

    second = line.start_worker()  # one that has no store: what is published is what the table holds
    line.wait_for(lambda: line.lag() == 0)
    copies = line.take(line.topics.results, 2)
    second.close()

    assert second.engine.seen == []
    result, again = (JobResult.decode(copy.value()) for copy in copies)
    assert result == again
    assert (result.id, result.state) == (id, JobState.SUCCEEDED)
    assert result.result_ref is not None


def test_a_prompt_longer_than_any_context_needs_no_reference(
    kafka: str, database_url: str, tmp_path: Path
) -> None:
    with pipeline(kafka, database_url, largest=MAX_LETTER_BYTES) as line:
        line.producer = Producer({"bootstrap.servers": kafka, "message.max.bytes": MAX_LETTER_BYTES})
        worker = line.start_worker(result_store=str(tmp_path))
        prompt = "\u00e9" * 4_000_000
        line.send(json.dumps({"prompt": prompt}, ensure_ascii=False).encode())
        line.wait_terminal(1)
        ((uri, size, digest),) = stored(line)
        worker.close()
        assert line.states() == {"succeeded": 1}
        whole = JobResult.decode(open_store(str(tmp_path)).read(uri, size, digest))
        assert whole.choices[0].text == f"echo: {prompt}"


def test_without_a_store_a_large_result_fails_and_says_what_to_set(line: Pipeline) -> None:
    worker = line.start_worker(max_result_bytes=LIMIT)
    body = {"prompt": LONG, "max_tokens": 5}
    line.send({"custom_id": "openai", "url": "/v1/completions", "body": body})
    line.send({"custom_id": "ours", "prompt": LONG})
    line.wait_terminal(2)
    found = {result.custom_id: result.error for (result,) in line.results(2).values()}
    worker.close()

    assert line.states() == {"failed": 2}
    for custom_id, param in (("ours", "sampling.max_tokens"), ("openai", "body.max_tokens")):
        error = found[custom_id]
        assert error is not None
        assert (error.code, error.param) == (ErrorCode.RESULT_TOO_LARGE, param)
        assert "HEADRACE_RESULT_STORE" in error.message


def refused(worker: RunningWorker) -> dict[str, float | None]:
    """Records that Kafka refused, by what was published instead."""
    registry, counter = worker.worker._metrics.registry, "headrace_records_refused_total"
    return {form: registry.get_sample_value(counter, {"outcome": form}) for form in list(Form)[1:]}


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
def test_a_trace_that_fills_a_record_keeps_no_result_from_the_topic(
    name: str, kafka: str, database_url: str
) -> None:
    values = {"traceparent": PARENT, "tracestate": b"vendor=" + NOISE}
    if name == "traceparent":  # of a later version, whose tail nobody knows
        values = {"traceparent": b"01" + PARENT[2:] + b"-" + NOISE, "tracestate": b"vendor=1"}
    with pipeline(kafka, database_url, largest=100_000) as line:
        worker = line.start_worker()
        id = line.submit("x", headers=list(values.items()))
        line.wait_terminal(1)
        (result,) = line.results(1)[id]
        (record,) = line.everything(line.topics.results)
        line.wait_for(lambda: line.lag() == 0)
        assert not any(refused(worker).values())
        worker.close()
    assert (result.state, len(result.choices)) == (JobState.SUCCEEDED, 1)
    carried = [(each, value) for each, value in record.headers() or [] if each in values]
    assert carried == ([] if name == "traceparent" else [("traceparent", PARENT)])


def test_a_topic_that_takes_less_than_the_setting_says_still_gets_how_each_job_ended(
    kafka: str, database_url: str
) -> None:
    if apache_kafka.describe() == apache_kafka.TANSU:
        pytest.skip("the embedded broker takes records of any size")
    with pipeline(kafka, database_url, largest_result=4000) as line:
        worker = line.start_worker()
        large = line.submit(NOISE[:6000].decode(), batch_id="b", custom_id="large", metadata={"k": "v"})
        small = {line.submit(f"prompt {n}", batch_id="b") for n in range(50)}
        trace = [("traceparent", PARENT), ("tracestate", b"vendor=" + NOISE[:3600])]
        traced = line.submit("traced", batch_id="b", headers=trace)
        line.wait_terminal(52)
        results = line.results(52)
        line.wait_for(lambda: line.lag() == 0)
        counted = refused(worker)
        worker.close()

        assert line.states() == {"succeeded": 52}
        assert counted == {"without_trace": 1, "without_answer": 1, "not_at_all": 0}
        for id in small | {traced}:
            (result,) = results[id]
            assert result.choices
            assert result.error is None
        (told,) = results[large]
        assert (told.state, told.choices, told.custom_id) == (JobState.SUCCEEDED, [], "large")
        assert told.metadata == {"k": "v"}
        assert told.error is not None
        assert told.error.code == ErrorCode.RESULT_TOO_LARGE
        assert told.to_openai()["error"]["code"] == ErrorCode.RESULT_TOO_LARGE
        ((body,),) = line.query("SELECT body FROM results WHERE id = %s", large)
        assert body["choices"][0]["text"] == f"echo: {NOISE[:6000].decode()}"
