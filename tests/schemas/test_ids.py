"""How a job gets its id, the same one for every reader."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import Source, job_key, named_key, uuid7
from headrace.schemas.ids import MAX_AGE_MS, MAX_AHEAD_MS, key_meant, out_of_range, time_ms

NOW = 1_795_000_000_000
SOURCE = Source("t", 3, 9, NOW)
# Constants, because tests run side by side only if every process names them alike.
UUID4 = "b4e151dd-fe31-4449-840a-54cb7c5a6902"
UUID7 = "01a228de-6177-7a46-8416-eb0527a7cd88"


def test_a_uuid7_is_its_own_id_in_any_case() -> None:
    id = uuid7()
    assert named_key("a", str(id)) == named_key("b", str(id).upper()) == id


@pytest.mark.parametrize(
    "name", ["order-17", UUID4, UUID7.replace("-", ""), f"{{{UUID7}}}", "\ud800", "x" * 10_000]
)
def test_any_other_name_is_hashed_with_its_tenant(name: str) -> None:
    key = named_key("a", name)
    assert key == named_key("a", name)
    assert key != named_key("b", name)
    assert key.bytes[0] == 0xFF


@given(st.text(), st.text())
def test_a_hashed_id_never_passes_for_a_uuid7(tenant: str, name: str) -> None:
    assert named_key(tenant, name).version == 8


@pytest.mark.parametrize("id", [uuid7(), named_key("acme", "order-17")])
def test_a_person_may_name_a_job_by_its_id_as_printed(id: UUID) -> None:
    assert key_meant("acme", str(id)) == key_meant("acme", str(id).upper()) == id


@pytest.mark.parametrize("name", ["order-17", UUID4, "ff", named_key("a", "b").hex])
def test_or_by_the_job_id_it_was_sent_with(name: str) -> None:
    assert key_meant("acme", name) == named_key("acme", name)


def test_tenant_and_name_do_not_run_into_each_other() -> None:
    assert named_key("ab", "c") != named_key("a", "bc")


def test_an_idempotency_key_names_a_job_without_job_id() -> None:
    key = job_key("a", None, SOURCE, "k")
    assert key == job_key("a", None, Source("other", 0, 0, 5), "k")
    assert key not in (job_key("b", None, SOURCE, "k"), named_key("a", "k"))
    assert job_key("a", "j", SOURCE, "k") == named_key("a", "j")


def test_a_nameless_job_is_named_by_its_place_so_that_a_replay_agrees() -> None:
    key = job_key("a", None, SOURCE)
    assert key == job_key("b", None, SOURCE)
    assert (key.version, time_ms(key)) == (7, NOW)
    others = [
        Source("t", 3, 10, NOW),
        Source("t", 4, 9, NOW),
        Source("u", 3, 9, NOW),
        Source("t", 3, 9, NOW, "id"),
    ]
    assert len({key, *(job_key("a", None, source) for source in others)}) == 5


@pytest.mark.parametrize("timestamp_ms", [-1, 0, 1 << 48, 1 << 63])
def test_a_timestamp_that_is_no_time_still_gives_an_id(timestamp_ms: int) -> None:
    assert job_key("a", None, Source("t", 0, 0, timestamp_ms)).version == 7


@given(st.integers(0, (1 << 48) - 2), st.binary(min_size=10, max_size=10))
def test_uuid7_has_rfc_9562s_layout(timestamp_ms: int, entropy: bytes) -> None:
    id = uuid7(timestamp_ms, entropy)
    assert (id.version, id.variant) == (7, UUID(int=0x8 << 60).variant)
    assert time_ms(id) == timestamp_ms
    assert uuid7(timestamp_ms + 1, b"\0" * 10) > id


def test_a_uuid7_far_from_its_record_is_out_of_range() -> None:
    for age, outside in ((0, False), (MAX_AGE_MS, False), (MAX_AGE_MS + 1, True), (-MAX_AHEAD_MS - 1, True)):
        assert out_of_range(uuid7(NOW - age), SOURCE) is outside
    assert not out_of_range(named_key("a", "b"), SOURCE)
    assert not out_of_range(uuid7(0), Source("t", 0, 0, -1))
