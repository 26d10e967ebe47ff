"""A batch from submit to its last result, with a worker, a job table and an engine that stands in for a model."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline import Pipeline, pipeline, recording

from headrace.client import Client
from headrace.ledger import BatchState
from headrace.schemas import ErrorCode, JobState
from headrace.schemas import topics as names

pytestmark = pytest.mark.timeout(300)

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def running(kafka: str, database_url: str) -> Iterator[Pipeline]:
    with pipeline(kafka, database_url, partitions=2) as made:
        made.start_worker()
        yield made


def test_a_batch_with_bad_lines_is_followed_to_its_end(running: Pipeline) -> None:
    lines = [
        b'{"custom_id": "plain", "prompt": "hello"}',
        b'{"custom_id": "nul", "prompt": "a\\u0000b"}',
        b'{"custom_id": "hot", "prompt": "x", "sampling": {"temperature": 9}}',
        b'{"custom_id": "half", "prompt": "\\ud800"}',
        b'{"custom_id": "line", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "best_of": 2}}',
        b"not json",
        b"\xff\xfe",
    ]
    with Client(running.bootstrap, running.topics) as client:
        submission = client.submit(lines)
        results = {result.custom_id: result for result in client.follow_results(submission, idle_timeout=120)}
    assert Counter(result.state for result in results.values()) == {JobState.SUCCEEDED: 2, JobState.FAILED: 3}
    assert results["plain"].choices[0].text == "echo: hello"
    assert results["nul"].choices[0].text == "echo: a\ufffdb"
    params = {name: result.error.param for name, result in results.items() if result.error}
    assert params == {"hot": "sampling.temperature", "half": "prompt", "line": "body.best_of"}
    assert {result.id for result in results.values()} == set(submission.ids)
    assert len(submission.problems) == 5
    rejected = running.ledger.rejections("default", submission.batch_id)
    assert {row.custom_id for row in rejected} == {"line 6", "line 7"}
    letters = running.dead_letters(2)
    assert {dict(letter.headers())[names.CUSTOM_ID] for letter in letters} == {b"line 6", b"line 7"}


def test_submitting_again_under_an_idempotency_key_runs_nothing_twice(running: Pipeline) -> None:
    lines = [{"custom_id": str(number), "prompt": f"number {number}"} for number in range(20)]
    with Client(running.bootstrap, running.topics) as client:
        first = client.submit(lines, idempotency_key="nightly")
        running.wait_terminal(20)
        # A job whose publishing is not confirmed yet would be joined by its second record, and published once.
        running.wait_for(lambda: running.lag() == 0)
        again = client.submit(lines, idempotency_key="nightly")
        results = list(client.follow_results(again, idle_timeout=120))
    assert again == first
    assert {result.id for result in results} == set(first.ids)
    # The second time each result is published again, and nothing is run.
    assert len(running.take(running.topics.results, 40)) == 40
    assert len(running.rows()) == 20
    assert Counter(running.workers[0].engine.seen).most_common(1)[0][1] == 1


def test_lines_sent_again_changed_mended_or_under_another_batch_end_it_for_followers_and_table_alike(
    running: Pipeline,
) -> None:
    lines = [b'{"custom_id": "same", "prompt": "a"}', b'{"custom_id": "changed", "prompt": "b"}', b"not json"]
    again = [
        lines[0],
        b'{"custom_id": "changed", "prompt": "other"}',
        b'{"custom_id": "mended", "prompt": "c"}',
    ]
    with Client(running.bootstrap, running.topics) as client, recording(running):
        client.submit(lines, idempotency_key="nightly")
        running.wait_terminal(2)
        sent = client.submit(again, idempotency_key="nightly")
        elsewhere = client.submit(again, batch_id="elsewhere", idempotency_key="nightly")
        unchanged = {sent.ids[0], sent.ids[2]}
        assert {result.id for result in client.follow_results(sent)} == unchanged
        assert {result.id for result in client.follow_results(sent.batch_id)} == set(sent.ids)
        assert list(client.follow_results(elsewhere)) == []

        def told(batch_id: str) -> tuple[BatchState, int, int] | None:
            batch = running.ledger.batch("default", batch_id)
            return batch and (batch.state, batch.succeeded, batch.rejected)

        running.wait_for(lambda: told(sent.batch_id) == (BatchState.COMPLETE, 3, 1))
        running.wait_for(lambda: told("elsewhere") == (BatchState.COMPLETE, 0, 3))
    assert [row.code for row in running.ledger.rejections("default", sent.batch_id)] == ["duplicate_job_id"]


@pytest.mark.parametrize("batch_id", [None, "elsewhere"])
def test_a_line_that_was_changed_under_its_key_is_told_and_does_not_get_the_former_answer(
    running: Pipeline, batch_id: str | None
) -> None:
    lines = [{"custom_id": "same", "prompt": "a"}, {"custom_id": "changed", "prompt": "France"}]
    with Client(running.bootstrap, running.topics) as client:
        client.submit(lines, idempotency_key="monday")
        running.wait_terminal(2)
        lines[1] = {"custom_id": "changed", "prompt": "Germany"}
        again = client.submit(lines, idempotency_key="monday", batch_id=batch_id)
        assert again.problems == []
        answers = [result.choices[0].text for result in client.follow_results(again, idle_timeout=120)]
    assert answers == (["echo: a"] if batch_id is None else [])
    refused = {problem.line: problem.code for problem in again.problems}
    assert refused == dict.fromkeys([2] if batch_id is None else [1, 2], ErrorCode.DUPLICATE_JOB_ID)


def test_the_python_of_the_readme_gets_its_answer(
    running: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    address = 'Client("localhost:9092")'
    assert address in found[1]
    script = found[1].replace(address, "Client(bootstrap, topics)")
    exec(script, {"bootstrap": running.bootstrap, "topics": running.topics})
    assert capsys.readouterr().out == "q-1 succeeded echo: The capital of France is\n"
