"""The client against a broker: what it sends, and what it makes of what comes back."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import apache_kafka
import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from headrace.client import (
    BrokerUnreachable,
    Client,
    DeliveryFailed,
    InvalidLine,
    InvalidName,
    Line,
    NoJobs,
    Submission,
    TopicMissing,
)
from headrace.client.announced import not_recorded
from headrace.schemas import (
    BatchClosed,
    BatchOpened,
    CancelBatch,
    CancelJob,
    Choice,
    ControlMessage,
    ErrorCode,
    JobResult,
    JobState,
    PromptJob,
    Source,
    Topics,
    named_key,
    parse_control,
    parse_job,
)
from headrace.schemas import topics as names

pytestmark = pytest.mark.timeout(300)


@dataclass
class Installation:
    """Topics of one test, with a look into them and a hand that plays the worker."""

    bootstrap: str
    topics: Topics

    def client(self, **options: object) -> Client:
        return Client(self.bootstrap, self.topics, **options)  # type: ignore[arg-type]

    def read(self, topic: str, count: int) -> list[Message]:
        """The records of ``topic``, of which there should be ``count``."""
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": str(uuid4()), "enable.auto.commit": False}
        )
        partitions = consumer.list_topics(topic).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        messages: list[Message] = consumer.consume(count, timeout=120)
        messages += consumer.consume(1, timeout=0.2)
        consumer.close()
        return messages

    def control(self, count: int) -> list[ControlMessage]:
        return [parse_control(message.value()) for message in self.read(self.topics.control, count)]

    def send(self, topic: str, key: bytes, value: bytes, headers: list[tuple[str, bytes]]) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        producer.produce(topic, value, key, headers=headers)
        producer.flush()

    def finish(self, submission: Submission, ids: list[UUID], times: int = 1) -> None:
        """Publish a result for each of ``ids``, ``times`` over."""
        for id in ids * times:
            result = JobResult(
                id=id,
                tenant=submission.tenant,
                batch_id=submission.batch_id,
                state=JobState.SUCCEEDED,
                choices=[Choice(text="yes", finish_reason="stop")],
            )
            self.send(self.topics.results, result.key, result.encode(), result.headers)


@pytest.fixture
def installation(kafka: str) -> Installation:
    topics = Topics(prefix=f"test-{uuid4().hex[:8]}")
    apache_kafka.create_topics(kafka, topics.all, partitions=2)
    return Installation(kafka, topics)


def source(message: Message) -> Source:
    return Source(
        message.topic() or "", message.partition() or 0, message.offset() or 0, message.timestamp()[1]
    )


def test_a_batch_is_opened_filled_and_closed_with_its_count(installation: Installation) -> None:
    jobs = [PromptJob(prompt="one"), {"prompt": "two"}, b'{"prompt": "three"}\n', "\n", '{"prompt": "four"}']
    with installation.client() as client:
        submission = client.submit(jobs, "bulk", metadata={"owner": "tests"})
    assert submission.expected == 4
    assert submission.problems == []
    opened, closed = sorted(installation.control(2), key=lambda message: message.type, reverse=True)
    assert isinstance(opened, BatchOpened)
    assert opened.metadata == {"owner": "tests"}
    assert isinstance(closed, BatchClosed)
    assert closed.expected == 4
    assert opened.batch_id == closed.batch_id == submission.batch_id
    messages = installation.read(installation.topics.jobs("bulk"), 4)
    parsed = [parse_job(message.value(), message.headers(), source(message)) for message in messages]
    assert {job.prompt for job in parsed} == {"one", "two", "three", "four"}
    assert {job.envelope.id for job in parsed} == set(submission.ids)
    assert {job.batch_id for job in parsed} == {submission.batch_id}
    assert {message.key().decode() for message in messages} == {str(id) for id in submission.ids}


def test_bad_lines_are_sent_as_they_are_and_reported_by_number(installation: Installation) -> None:
    lines = [
        b'{"prompt": "good"}',
        b"not json",
        b'{"prompt": "hot", "sampling": {"temperature": 9}}',
        b"\xff",
    ]
    with installation.client() as client:
        submission = client.submit(lines)
    assert [(problem.line, problem.code, problem.param) for problem in submission.problems] == [
        (2, ErrorCode.INVALID_JSON, None),
        (3, ErrorCode.INVALID_VALUE, "sampling.temperature"),
        (4, ErrorCode.INVALID_ENCODING, None),
    ]
    assert submission.expected == 4
    assert len(submission.ids) == 2
    messages = installation.read(installation.topics.jobs("standard"), 4)
    assert {message.value() for message in messages} == set(lines)
    assert {dict(message.headers())[names.BATCH_ID] for message in messages} == {submission.batch_id.encode()}


@pytest.mark.parametrize(
    "jobs", ["jobs.jsonl", b'{"prompt": "a"}', {"prompt": "a"}, PromptJob(prompt="a")], ids=repr
)
def test_a_single_job_or_a_file_s_name_is_not_sent_in_pieces(jobs: Any) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="must be a list, an open file"):
        client.submit(jobs)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"deadline": datetime(2030, 1, 1)},
            "deadline is not usable: it must be a datetime with a time zone",
        ),
        ({"deadline": "soon"}, "deadline is not usable: it must be a datetime with a time zone"),
        ({"idempotency_key": 5}, "idempotency_key must be a string; this is int"),
        ({"idempotency_key": ""}, "idempotency_key is empty"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(given: dict[str, Any], reason: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidName, match=reason):
        client.submit([{"prompt": "a"}], **given)


def test_a_deadline_may_be_told_in_its_iso_form(installation: Installation) -> None:
    deadline: Any = "2099-01-01T00:00:00+02:00"
    with installation.client() as client:
        client.submit([{"prompt": "a"}], deadline=deadline)
    (message,) = installation.read(installation.topics.jobs("standard"), 1)
    job = parse_job(message.value(), message.headers(), source(message))
    assert job.envelope.deadline == datetime.fromisoformat(deadline)


@pytest.mark.parametrize("jobs", [[], iter([]), ["\n", b" "]])
def test_no_jobs_make_no_batch(jobs: list[Line], installation: Installation) -> None:
    with installation.client() as client:
        with pytest.raises(NoJobs, match="there are no jobs"):
            client.submit(jobs)
        client.cancel_batch("b")
    assert [type(message) for message in installation.control(1)] == [CancelBatch]


STRICT = [{"prompt": "a"}, {"prompt": "b", "sampling": {"top_p": 0}}, {"prompt": "c"}]


def test_a_strict_submit_of_what_can_be_read_twice_sends_nothing_if_a_line_is_bad(
    installation: Installation, tmp_path: Path
) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_bytes(b'{"prompt": "a"}\nnot json\n')
    with file.open("rb") as lines, installation.client() as client:
        with pytest.raises(InvalidLine, match=r"line 2: sampling\.top_p must be a number above 0"):
            client.submit(STRICT, strict=True)
        with pytest.raises(InvalidLine, match="line 2: "):
            client.submit(lines, strict=True)
        file.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
        lines.seek(0)
        assert client.submit(lines, strict=True).expected == 2
    assert [type(message) for message in installation.control(2)] == [BatchOpened, BatchClosed]


def test_a_broken_off_submit_cancels_the_batch_that_it_named(installation: Installation) -> None:
    with installation.client() as client, pytest.raises(InvalidLine):
        client.submit(iter(STRICT), strict=True)
    assert {type(message) for message in installation.control(2)} == {BatchOpened, CancelBatch}


def test_a_broken_off_submit_leaves_a_batch_that_others_may_use_alone(installation: Installation) -> None:
    with installation.client() as client, pytest.raises(InvalidLine):
        client.submit(iter(STRICT), batch_id="everybodys", strict=True)
    assert [type(message) for message in installation.control(1)] == [BatchOpened]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "1 to 256 characters"),
        ("a\x07b", "control characters"),
        ("x" * 1000, "1 to 256 characters"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_name_that_no_batch_can_have_is_refused(name: str, reason: str) -> None:
    client = Client("127.0.0.1:1", kafka={"log_level": 0})
    with pytest.raises(InvalidName, match=f"batch_id is not usable: .*{reason}"):
        client.submit([{"prompt": "a"}], batch_id=name)
    with pytest.raises(InvalidName, match=f"batch_id is not usable: .*{reason}"):
        client.cancel_batch(name)


def test_submitting_again_under_an_idempotency_key_gives_the_same_jobs(installation: Installation) -> None:
    lines = [{"custom_id": "a", "prompt": "x"}, {"custom_id": "a", "prompt": "y"}, {"prompt": "z"}]
    with installation.client() as client:
        first = client.submit(lines, idempotency_key="nightly")
        second = client.submit(lines, idempotency_key="nightly")
        other = client.submit(lines, idempotency_key="weekly")
    assert first == second
    assert len(set(first.ids)) == 3
    assert not set(first.ids) & set(other.ids)
    messages = installation.read(installation.topics.jobs("standard"), 9)
    content = {
        (job.id, job.content_sha)
        for job in (
            parse_job(message.value(), message.headers(), source(message)).envelope for message in messages
        )
    }
    assert len(content) == 6


def test_a_broken_off_submit_with_an_idempotency_key_leaves_the_batch_open(
    installation: Installation,
) -> None:
    def lines() -> Iterator[dict[str, str]]:
        yield {"prompt": "a"}
        raise OSError("the disk is gone")

    client = installation.client()
    with pytest.raises(OSError, match="the disk is gone"):
        client.submit(lines(), idempotency_key="again")
    client.close()
    assert [type(message) for message in installation.control(1)] == [BatchOpened]


def test_a_line_too_large_for_kafka_is_reported_and_the_rest_is_sent(installation: Installation) -> None:
    with installation.client() as client:
        submission = client.submit([{"prompt": "x" * 1_100_000}, {"prompt": "small"}])
    assert [(problem.line, problem.code, problem.sent) for problem in submission.problems] == [
        (1, ErrorCode.MESSAGE_TOO_LARGE, False)
    ]
    assert submission.expected == 1


def test_more_than_the_buffer_holds_is_sent_by_waiting(installation: Installation) -> None:
    with installation.client(kafka={"queue.buffering.max.messages": 50}) as client:
        submission = client.submit({"prompt": f"number {number}"} for number in range(2_000))
    assert submission.expected == len(set(submission.ids)) == 2_000
    assert len(installation.read(installation.topics.jobs("standard"), 2_000)) == 2_000


def test_cancels_name_their_target(installation: Installation) -> None:
    id = uuid4()
    with installation.client(tenant="acme") as client:
        client.cancel_batch("b")
        client.cancel_job("mine")
        client.cancel_job(str(named_key("acme", "its id as printed")))
        client.cancel_job(id)
    cancels = installation.control(4)
    assert {(type(cancel), cancel.tenant) for cancel in cancels} == {
        (CancelBatch, "acme"),
        (CancelJob, "acme"),
    }
    assert {cancel.key for cancel in cancels if isinstance(cancel, CancelJob)} == {
        id,
        named_key("acme", "mine"),
        named_key("acme", "its id as printed"),
    }


def test_following_gives_each_result_once_and_ends_with_the_batch(installation: Installation) -> None:
    with installation.client() as client:
        other = client.submit([{"prompt": "other"}])
        submission = client.submit([{"prompt": "a"}, {"prompt": "b"}])
        installation.finish(other, other.ids)
        installation.finish(submission, submission.ids, times=2)
        results = list(client.follow_results(submission))
    assert sorted(result.id for result in results) == sorted(submission.ids)


def test_following_counts_rejected_records_as_ended(installation: Installation) -> None:
    with installation.client() as client:
        submission = client.submit([{"prompt": "a"}, b"not json"])
        headers = [
            (names.TENANT, b"default"),
            (names.BATCH_ID, submission.batch_id.encode()),
            (names.DEAD_CODE, b"invalid_json"),
        ]
        installation.send(installation.topics.dead, b"k", b"not json", headers)
        installation.finish(submission, submission.ids)
        assert [result.id for result in client.follow_results(submission.batch_id)] == submission.ids


def test_following_a_batch_that_is_still_filled_waits_for_its_end(installation: Installation) -> None:
    with installation.client() as client:
        submission = client.submit([{"prompt": "a"}, {"prompt": "b"}])
        installation.finish(submission, submission.ids[:1])
        following = client.follow_results(submission)
        assert next(following).id == submission.ids[0]
        installation.finish(submission, submission.ids[1:])
        assert [result.id for result in following] == submission.ids[1:]


def test_following_a_batch_that_was_sent_again_waits_for_the_largest_number(
    installation: Installation,
) -> None:
    with installation.client() as client:
        grown = client.submit([{"prompt": "a"}, {"prompt": "b"}], idempotency_key="k")
        shrunk = client.submit([{"prompt": "a"}], idempotency_key="k")
        assert shrunk.ids == grown.ids[:1]
        installation.finish(grown, grown.ids[:1])
        following = client.follow_results(shrunk)
        assert next(following).id == grown.ids[0]
        installation.finish(grown, grown.ids[1:])
        assert [result.id for result in following] == grown.ids[1:]


def test_following_counts_a_bad_line_that_was_sent_again_once(installation: Installation) -> None:
    lines: list[Line] = [{"prompt": "a"}, b"not json", {"prompt": "b"}]
    with installation.client() as client:
        client.submit(lines[:2], idempotency_key="k")
        grown = client.submit(lines, idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 5):
            if message.value() == b"not json":
                headers = [*(message.headers() or []), (names.DEAD_CODE, b"invalid_json")]
                installation.send(installation.topics.dead, b"k", b"not json", headers)
        installation.finish(grown, grown.ids[:1])
        following = client.follow_results(grown)
        assert next(following).id == grown.ids[0]
        installation.finish(grown, grown.ids[1:])
        assert [result.id for result in following] == grown.ids[1:]


def test_following_counts_no_line_of_a_changed_file_that_was_sent_again(installation: Installation) -> None:
    with installation.client() as client:
        sent = client.submit([{"prompt": "a"}, {"prompt": "b"}], idempotency_key="k")
        client.submit([{"prompt": "x"}, {"prompt": "y"}], idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 4):
            if b'"x"' in (message.value() or b"") or b'"y"' in (message.value() or b""):
                headers = [*(message.headers() or []), (names.DEAD_CODE, b"duplicate_job_id")]
                installation.send(installation.topics.dead, b"k", message.value() or b"", headers)
        installation.finish(sent, sent.ids[:1])
        following = client.follow_results(sent)
        assert next(following).id == sent.ids[0]
        installation.finish(sent, sent.ids[1:])
        assert [result.id for result in following] == sent.ids[1:]


def reject(installation: Installation, message: Message, code: str, **headers: bytes) -> None:
    """Play the worker that rejects a record."""
    more = [(names.DEAD_CODE, code.encode())] + [
        (getattr(names, name), value) for name, value in headers.items()
    ]
    place = [
        (names.DEAD_TOPIC, (message.topic() or "").encode()),
        (names.DEAD_PARTITION, b"%d" % (message.partition() or 0)),
        (names.DEAD_OFFSET, b"%d" % (message.offset() or 0)),
        (names.DEAD_TIMESTAMP, b"%d" % message.timestamp()[1]),
        (names.DEAD_RUN, b"1"),
    ]
    dead = installation.topics.dead
    installation.send(
        dead, message.key() or b"", message.value() or b"", [*(message.headers() or []), *place, *more]
    )


@pytest.mark.parametrize("by_name", [False, True])
def test_following_a_batch_whose_lines_are_all_jobs_of_another_one_ends(
    installation: Installation, by_name: bool
) -> None:
    with installation.client() as client:
        first = client.submit([{"prompt": "a"}, {"prompt": "b"}], batch_id="first", idempotency_key="k")
        second = client.submit([{"prompt": "a"}, {"prompt": "b"}], batch_id="second", idempotency_key="k")
        assert second.ids == first.ids
        for message in installation.read(installation.topics.jobs("standard"), 4):
            if dict(message.headers() or [])[names.BATCH_ID] == b"second":
                reject(installation, message, "duplicate_job_id", DEAD_SAME_BATCH=b"false")
        assert list(client.follow_results("second" if by_name else second)) == []


@pytest.mark.parametrize("mended", [{"prompt": "b"}, {"custom_id": "mended", "prompt": "b"}])
def test_following_counts_a_bad_line_that_was_mended_and_sent_again_once(
    installation: Installation, mended: Line
) -> None:
    lines: list[Line] = [{"prompt": "a"}, b"not json", {"prompt": "c"}]
    with installation.client() as client:
        client.submit(lines, idempotency_key="k")
        sent = client.submit([lines[0], mended, lines[2]], idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 6):
            if message.value() == b"not json":
                reject(installation, message, "invalid_json")
        installation.finish(sent, sent.ids[:2])
        following = client.follow_results(sent.batch_id)
        assert {next(following).id, next(following).id} == set(sent.ids[:2])
        installation.finish(sent, sent.ids[2:])
        assert [result.id for result in following] == sent.ids[2:]


def test_following_ends_with_jobs_that_postgres_refused_and_results_of_another_version(
    installation: Installation,
) -> None:
    with installation.client() as client:
        sent = client.submit([{"prompt": "a"}, {"prompt": "b"}])
        for message in installation.read(installation.topics.jobs("standard"), 2):
            if message.key() == str(sent.ids[0]).encode():
                reject(installation, message, "ledger_rejected")
        headers = [(names.TENANT, b"default"), (names.BATCH_ID, sent.batch_id.encode())]
        installation.send(installation.topics.results, str(sent.ids[1]).encode(), b"{}", headers)
        assert list(client.follow_results(sent)) == []


def test_following_a_larger_sending_still_counts_what_it_had_rejected(installation: Installation) -> None:
    with installation.client() as client:
        grown = client.submit([{"prompt": "a"}, b"not json"], idempotency_key="k")
        client.submit([{"prompt": "a"}], idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 3):
            if message.value() == b"not json":
                reject(installation, message, "invalid_json")
        installation.finish(grown, grown.ids)
        assert [result.id for result in client.follow_results(grown)] == grown.ids


def test_following_a_submission_waits_for_each_of_its_jobs(installation: Installation) -> None:
    named = [{"custom_id": name, "prompt": name} for name in ("a", "b", "c")]
    with installation.client() as client:
        before = client.submit(named[:2], idempotency_key="k")
        sent = client.submit(named[1:], idempotency_key="k")  # as many lines, one of them in another's place
        installation.finish(before, before.ids)
        following = client.follow_results(sent)
        assert {next(following).id, next(following).id} == set(before.ids)
        installation.finish(sent, sent.ids[1:])
        assert [result.id for result in following] == sent.ids[1:]


def test_following_counts_a_second_line_of_one_name_though_it_was_sent_under_a_key(
    installation: Installation,
) -> None:
    with installation.client() as client:
        lines = [{"job_id": "mine", "prompt": "a"}, {"job_id": "mine", "prompt": "b"}]
        sent = client.submit(lines, idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 2):
            if b'"b"' in (message.value() or b""):
                reject(installation, message, "duplicate_job_id", DEAD_SAME_BATCH=b"true")
        installation.finish(sent, sent.ids[:1])
        assert [result.id for result in client.follow_results(sent)] == sent.ids[:1]


def test_following_ends_with_a_changed_line_though_the_first_answer_is_no_longer_on_the_topic(
    installation: Installation,
) -> None:
    lines = [{"custom_id": name, "prompt": name} for name in ("a", "b")]
    with installation.client() as client:
        client.submit(lines, idempotency_key="k")
        lines[1]["prompt"] = "changed"
        sent = client.submit(lines, idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 4):
            if b"changed" in (message.value() or b""):
                reject(installation, message, "duplicate_job_id", DEAD_SAME_BATCH=b"true")
        installation.finish(sent, sent.ids[:1])
        assert [result.id for result in client.follow_results(sent)] == sent.ids[:1]
    assert [problem.line for problem in sent.problems] == [2]


def test_a_line_is_refused_by_a_letter_of_its_own_content_alone(installation: Installation) -> None:
    lines: list[Line] = [
        {"custom_id": "a", "prompt": "once"},
        {"custom_id": "b", "prompt": "x"},
        {"job_id": "late", "prompt": "y"},
    ]
    with installation.client() as client:
        client.submit([{"custom_id": "a", "prompt": "another time"}], idempotency_key="k")
        sent = client.submit(lines, idempotency_key="k")
        for message in installation.read(installation.topics.jobs("standard"), 4):
            if any(prompt in (message.value() or b"") for prompt in (b"another time", b'"x"')):
                reject(installation, message, "duplicate_job_id", DEAD_SAME_BATCH=b"true")
            if b"late" in (message.value() or b""):
                reject(installation, message, "job_id_out_of_range", DEAD_MESSAGE=b"too late")
        installation.finish(sent, sent.ids[:2])
        list(client.follow_results(sent, idle_timeout=60))
    assert {(problem.line, problem.code) for problem in sent.problems} == {
        (2, ErrorCode.DUPLICATE_JOB_ID),
        (3, ErrorCode.JOB_ID_OUT_OF_RANGE),
    }
    assert "line 3: too late" in map(str, sent.problems)


def test_of_what_was_announced_only_that_is_told_which_the_recorder_has_not_confirmed(
    installation: Installation,
) -> None:
    def told(batch_id: str) -> int | None:
        kafka = {"bootstrap.servers": installation.bootstrap}
        return not_recorded(kafka, installation.topics, "default", batch_id).expected

    with installation.client() as client:
        submission = client.submit([{"prompt": "a"}, {"prompt": "b"}], idempotency_key="k")
        client.submit([{"prompt": "a"}], idempotency_key="k")
        client.submit([{"prompt": "other"}] * 7)
        assert told(submission.batch_id) == 2
        recorder = Consumer(
            {"bootstrap.servers": installation.bootstrap, "group.id": installation.topics.recorder_group}
        )
        ends = [TopicPartition(installation.topics.control, number) for number in range(2)]
        for end in ends:
            end.offset = recorder.get_watermark_offsets(end)[1]
        recorder.commit(offsets=ends, asynchronous=False)
        recorder.close()
        assert told(submission.batch_id) is None
        client.submit([{"prompt": "a"}] * 3, idempotency_key="k")
        assert told(submission.batch_id) == 3


def test_following_gives_up_after_idle_time(installation: Installation) -> None:
    with installation.client() as client:
        submission = client.submit([{"prompt": "a"}])
        assert list(client.follow_results(submission, idle_timeout=1)) == []


def test_a_missing_topic_is_named(kafka: str) -> None:
    with pytest.raises(TopicMissing, match=r"nowhere\.control\.v1"):
        list(Client(kafka, Topics(prefix="nowhere")).follow_results("b"))


def test_nothing_is_sent_where_a_topic_is_missing(kafka: str) -> None:
    topics = Topics(prefix=f"test-{uuid4().hex[:8]}")
    apache_kafka.create_topics(kafka, [topics.control], partitions=1)
    client = Client(kafka, topics, kafka={"log_level": 0})
    with pytest.raises(TopicMissing, match=topics.jobs("standard")):
        client.submit([{"prompt": "a"}])
    assert Installation(kafka, topics).control(0) == []
    with pytest.raises(TopicMissing, match="nowhere"):
        Client(kafka, Topics(prefix="nowhere")).cancel_batch("b")


def test_a_submit_to_no_broker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.outbox._PATIENCE_S", 0.5)
    with (
        Client("127.0.0.1:1", kafka={"log_level": 0}) as client,
        pytest.raises(BrokerUnreachable, match="Kafka does not answer"),
    ):
        client.submit([{"prompt": "a"}])


@pytest.mark.skipif(
    not apache_kafka.describe().startswith("Apache Kafka"),
    reason="this broker makes topics that are asked for",
)
def test_records_that_kafka_does_not_take_surface_and_their_batch_is_cancelled(kafka: str) -> None:
    topics = Topics(prefix=f"test-{uuid4().hex[:8]}")
    apache_kafka.create_topics(kafka, [topics.control], partitions=1)
    client = Client(kafka, topics, kafka={"message.timeout.ms": 5_000, "log_level": 0})
    client._found = set(topics.all)  # the jobs' topic has gone since
    with pytest.raises(DeliveryFailed, match="3 records did not reach Kafka") as caught:
        client.submit([{"prompt": "a"}] * 3)
    assert len(caught.value.keys) == caught.value.failed == 3
    types = [type(message) for message in Installation(kafka, topics).control(2)]
    assert types == [BatchOpened, CancelBatch]


WAITING = """
import signal
from headrace.client import Client
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
with Client("127.0.0.1:1", kafka={"log_level": 0}) as client:
    client._found = %s
    print("ready", flush=True)
    client.submit([{"prompt": "a"}])
"""


@pytest.mark.parametrize("known", ["set()", "set(client.topics.all)"])
def test_one_interrupt_ends_a_submit_that_waits_for_kafka(known: str) -> None:
    command = [sys.executable, "-c", WAITING % known]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # into the wait, which lasts 10 s in the one case and 120 s in the other
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=180)
        finally:
            process.kill()
    assert err.strip().endswith("KeyboardInterrupt")


def test_a_broker_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.reading.PATIENCE_S", 0.5)
    with pytest.raises(BrokerUnreachable, match="Kafka does not answer"):
        list(Client("127.0.0.1:1", kafka={"log_level": 0}).follow_results("b"))
