"""Names and numbers that must never change once they are out."""

import pytest

from headrace.schemas import ErrorCode, JobState, Outcome, Topics
from headrace.schemas.wire import MAX_RECORD_BYTES


def test_state_codes_are_those_of_the_job_table() -> None:
    assert [(state.value, state.code) for state in JobState] == [
        ("queued", 0),
        ("running", 1),
        ("succeeded", 2),
        ("failed", 3),
        ("cancelled", 4),
        ("expired", 5),
    ]


def test_a_job_that_is_queued_or_running_has_not_ended() -> None:
    assert [state for state in JobState if not state.terminal] == [JobState.QUEUED, JobState.RUNNING]


def test_every_outcome_but_rejected_is_a_state() -> None:
    assert {JobState(outcome).terminal for outcome in Outcome if outcome is not Outcome.REJECTED} == {True}


def test_an_error_code_is_its_value() -> None:
    assert ErrorCode("invalid_json") is ErrorCode.INVALID_JSON
    assert f"{ErrorCode.INVALID_JSON}" == ErrorCode.INVALID_JSON == "invalid_json"
    assert ErrorCode.INVALID_JSON.outcome is Outcome.REJECTED
    assert all(code.meaning.endswith(".") for code in ErrorCode)


def test_topics_of_the_default_installation() -> None:
    assert Topics().all == (
        "headrace.jobs.v1.interactive",
        "headrace.jobs.v1.standard",
        "headrace.jobs.v1.bulk",
        "headrace.results.v1",
        "headrace.control.v1",
        "headrace.dead.v1",
    )


@pytest.mark.parametrize("pool", [None, "qwen3-8b"])
def test_a_topic_of_jobs_tells_its_tier(pool: str | None) -> None:
    topics = Topics("acme.prod", pool)
    assert [topics.tier_of(topics.jobs(tier)) for tier in topics.tiers] == list(topics.tiers)
    other = Topics("acme.prod", "other").jobs("bulk")
    for topic in (topics.results, "bulk", "acme.prod.jobs.v1.urgent", other):
        with pytest.raises(ValueError, match="is no topic of jobs here"):
            topics.tier_of(topic)


def test_an_unknown_tier_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'urgent' is no tier; there are interactive, standard, bulk"):
        Topics().jobs("urgent")


@pytest.mark.parametrize(
    "options",
    [
        {"prefix": "a_b"},
        {"prefix": ""},
        {"prefix": "a..b"},
        {"pool": "a.b"},
        {"tiers": ("A",)},
        {"tiers": ()},
    ],
)
def test_names_that_kafka_or_tier_of_would_trip_over_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"topic label|at least one"):
        Topics(**options)  # type: ignore[arg-type]


def test_dead_letters_may_be_larger_than_the_records_they_hold() -> None:
    names = Topics()
    assert int(names.config(names.dead)["max.message.bytes"]) > MAX_RECORD_BYTES
    assert {topic for topic in names.all if names.config(topic)} == {names.dead}
