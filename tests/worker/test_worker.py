"""The main path: what happens to jobs that nothing goes wrong with, and to bad ones among them."""

import json
import subprocess
from collections import Counter

import pytest
from apache_kafka import console_producer
from confluent_kafka import KafkaException
from pipeline import Pipeline
from standin import StandInEngine

from headrace.schemas import ErrorCode, JobResult, JobState, topics

TIERS = ("interactive", "standard", "bulk")


def test_every_job_ends_once_in_the_table_and_on_the_results_topic(line: Pipeline) -> None:
    worker = line.start_worker()
    ids = {line.submit(f"prompt {n}", TIERS[n % 3], batch_id="b", custom_id=str(n)): n for n in range(300)}

    line.wait_terminal(300)
    results = line.results(300)
    worker.close()

    assert line.rows() == dict.fromkeys(ids, "succeeded")
    assert results.keys() == ids.keys()
    for id, number in ids.items():
        (result,) = results[id]
        assert result.state is JobState.SUCCEEDED
        assert result.choices[0].text == f"echo: prompt {number}"
        assert (result.batch_id, result.custom_id, result.run, result.attempt) == ("b", str(number), 1, 1)
    assert sum(map(line.lag, TIERS)) == 0
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL") == [(0,)]
    assert line.query("SELECT count(*) FROM workers WHERE alive_until > now()") == [(0,)]


def test_finished_jobs_that_come_again_are_skipped_and_published_again(line: Pipeline) -> None:
    first = line.start_worker()
    ids = {line.submit(f"prompt {n}") for n in range(50)} | {line.submit("fail:no_good")}
    line.wait_terminal(51)
    line.results(51)
    first.close()
    line.forget_offsets("standard")

    second = line.start_worker()
    line.wait_for(lambda: line.lag() == 0)
    second.close()

    assert second.engine.seen == []
    copies = [JobResult.decode(message.value()) for message in line.take(line.topics.results, 102)]
    assert Counter(copy.id for copy in copies) == dict.fromkeys(ids, 2)
    assert len({copy.encode() for copy in copies}) == 51


def test_a_bad_job_fails_alone(line: Pipeline) -> None:
    worker = line.start_worker(model_names=("alias",))
    good = {line.submit(f"prompt {n}", batch_id="b") for n in range(20)}
    bad = {
        line.submit("x", batch_id="b", model="no-such-model"): (ErrorCode.UNKNOWN_MODEL, "model"),
        line.submit("x", batch_id="b", sampling={"temperature": 9}): (
            ErrorCode.INVALID_VALUE,
            "sampling.temperature",
        ),
        line.submit("fail:context_length_exceeded", batch_id="b"): (ErrorCode.CONTEXT_LENGTH_EXCEEDED, None),
    }
    good |= {line.submit("x", batch_id="b", model=name) for name in ("alias", "stand-in")}

    line.wait_terminal(25)
    results = line.results(25)
    worker.close()

    assert line.rows() == {**dict.fromkeys(good, "succeeded"), **dict.fromkeys(bad, "failed")}
    for id, (code, param) in bad.items():
        (result,) = results[id]
        assert result.error is not None
        assert (result.error.code, result.error.param) == (code, param)
        named = "alias, stand-in" in result.error.message
        assert named == (code == ErrorCode.UNKNOWN_MODEL)  # the message lists what is served


def test_a_model_in_a_directory_is_called_by_the_directorys_name(line: Pipeline) -> None:
    worker = line.start_worker(lambda: StandInEngine(model="/models/My-Model-1B"))
    id = line.submit("x", model="My-Model-1B")
    line.wait_terminal(1)
    ((result,),) = line.results(1).values()
    worker.close()
    assert (line.rows(), result.model) == ({id: "succeeded"}, "My-Model-1B")


def test_unparsable_bytes_go_to_the_dead_letter_topic_unchanged(line: Pipeline) -> None:
    worker = line.start_worker()
    bad = [b"\xff\xfe not text", b'{"prompt": "cut o', b"[1, 2]", b"", None]
    for value in bad:
        headers = [(topics.BATCH_ID, b"b"), ("x-mine", b"\x00\x01")]
        line.send(value, headers=headers, key=b"\xfekey", partition=2)
    good = line.submit("hello", batch_id="b")

    line.wait_terminal(1)
    letters = line.dead_letters(5)
    line.wait_for(lambda: line.lag() == 0)
    worker.close()

    assert line.rows() == {good: "succeeded"}
    assert [letter.value() for letter in letters] == bad
    for offset, letter in enumerate(letters):
        headers = dict(letter.headers())
        assert letter.key() == b"\xfekey"
        assert (headers[topics.BATCH_ID], headers["x-mine"]) == (b"b", b"\x00\x01")
        assert headers[topics.DEAD_TOPIC].decode() == line.topics.jobs("standard")
        assert (headers[topics.DEAD_PARTITION], headers[topics.DEAD_OFFSET]) == (b"2", str(offset).encode())
        assert headers[topics.DEAD_CODE].decode() in set(ErrorCode)
        assert headers[topics.DEAD_MESSAGE]
    assert line.query("SELECT count(*), min(batch_id) FROM rejections") == [(5, "b")]


def test_the_same_id_again_is_the_same_job_and_with_other_content_none(line: Pipeline) -> None:
    worker = line.start_worker(lambda: StandInEngine(latency_s=0.2))
    for prompt in ("one", "one", "other", "one"):
        line.send({"job_id": "mine", "prompt": prompt, "batch_id": "b"}, partition=0)

    line.wait_terminal(1)
    line.wait_for(lambda: line.lag() == 0)
    (letter,) = line.dead_letters(1)
    worker.close()

    assert list(line.rows().values()) == ["succeeded"]
    ((results,)) = line.results(1).values()
    assert results[0].choices[0].text == "echo: one"
    assert len(worker.engine.seen) == 1
    assert dict(letter.headers())[topics.DEAD_CODE] == b"duplicate_job_id"
    assert dict(letter.headers())[topics.DEAD_OFFSET] == b"2"


@pytest.mark.parametrize("wrong", [{"fetch.min.bytes": "x"}, {"session.timeout.ms": "700000"}])
def test_settings_that_a_consumer_does_not_take_end_the_worker_with_kafkas_own_error(
    line: Pipeline, wrong: dict[str, str]
) -> None:
    worker = line.start_worker(kafka=wrong)
    with pytest.raises(KafkaException, match=next(iter(wrong))):
        worker.close()
    assert worker.engine.closed


def test_a_retriable_error_is_tried_again_until_it_passes(line: Pipeline) -> None:
    worker = line.start_worker()
    id = line.submit("flaky:2")
    line.wait_terminal(1)
    ((result,),) = line.results(1).values()
    worker.close()

    assert (line.rows(), result.attempt) == ({id: "succeeded"}, 3)
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL OR died") == [(0,)]


def test_the_trace_of_a_job_goes_on_with_its_result(line: Pipeline) -> None:
    worker = line.start_worker()
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    line.send(
        {"prompt": "x", "custom_id": "c"}, headers=[("traceparent", trace), ("tracestate", b"vendor=1")]
    )
    line.wait_terminal(1)
    (message,) = line.take(line.topics.results, 1)
    worker.close()

    headers = dict(message.headers())
    assert (headers["traceparent"], headers["tracestate"]) == (trace, b"vendor=1")
    assert headers[topics.CUSTOM_ID] == b"c"
    assert JobResult.decode(message.value()).custom_id == "c"


def test_a_producer_that_is_not_ours_gets_its_answer(line: Pipeline) -> None:
    command = console_producer(line.bootstrap, line.topics.jobs("bulk"))
    if command is None:
        pytest.skip("Kafka's own tools could not be resolved")
    worker = line.start_worker()
    subprocess.run(
        command, input=json.dumps({"prompt": "from the console"}).encode(), check=True, timeout=180
    )
    line.wait_terminal(1)
    ((result,),) = line.results(1).values()
    worker.close()

    assert line.states() == {"succeeded": 1}
    assert result.choices[0].text == "echo: from the console"
