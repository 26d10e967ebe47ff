"""One tier: earliest deadline first, fair between tenants, limits, patience, memory."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_job import StubJob

from headrace.worker.tier_queue import COMPACT_AFTER, ROUND_TOKENS, Owner, TierQueue


def queue_of(
    *jobs: StubJob, patience: float = math.inf, barred: set[Owner] | None = None
) -> TierQueue[StubJob]:
    queue: TierQueue[StubJob] = TierQueue(patience, set() if barred is None else barred)
    for job in jobs:
        queue.put(job, 0.0)
    return queue


def drain(queue: TierQueue[StubJob], most: float = math.inf) -> list[StubJob]:
    drained: list[StubJob] = []
    while len(drained) < most and queue.first() is not None:
        drained.append(queue.pop())
    return drained


def names(jobs: list[StubJob]) -> list[str]:
    return [job.name for job in jobs]


def test_a_tenant_alone_is_served_by_deadline_then_by_age() -> None:
    queue = queue_of(*(StubJob(name=name, deadline_s=due) for name, due in
                       (("none", None), ("late", 30.0), ("soon", 10.0), ("none too", None))))  # fmt: skip
    assert names(drain(queue)) == ["soon", "late", "none", "none too"]


def test_tenants_within_their_part_of_a_round_are_served_by_deadline_across_them() -> None:
    queue = queue_of(*(StubJob(name=name, tenant=name[0], deadline_s=due) for name, due in
                       (("a1", 40.0), ("b1", 30.0), ("c1", 10.0), ("a2", 20.0))))  # fmt: skip
    assert names(drain(queue)) == ["c1", "a2", "b1", "a1"]


def test_a_tenant_that_floods_gets_its_part_and_no_more() -> None:
    """However early its deadlines are, and however large or small its jobs."""
    flood = [StubJob(tenant="loud", cost=50, deadline_s=float(n)) for n in range(4000)]
    quiet = [StubJob(tenant="quiet", cost=300) for _ in range(200)]
    spent: Counter[str] = Counter()
    queue = queue_of(*flood, *quiet)
    while spent.total() < 80_000:
        assert queue.first() is not None
        job = queue.pop()
        spent[job.tenant] += job.cost
    assert spent["quiet"] / spent.total() == pytest.approx(0.5, abs=0.05)


def test_one_who_sends_a_job_at_a_time_does_not_starve_one_who_has_many_waiting() -> None:
    queue = queue_of(*(StubJob(tenant="backlog", cost=100) for _ in range(500)))
    spent: Counter[str] = Counter()
    for _ in range(600):
        if spent["again"] <= spent.total():
            queue.put(StubJob(tenant="again", cost=100, deadline_s=0.0), 0.0)
        assert queue.first() is not None
        job = queue.pop()
        spent[job.tenant] += job.cost
    assert spent["backlog"] / spent.total() == pytest.approx(0.5, abs=0.05)


def test_a_job_larger_than_many_rounds_goes_when_its_tenant_has_saved_for_it() -> None:
    large = StubJob(tenant="large", cost=10 * ROUND_TOKENS, name="large")
    small = [StubJob(tenant="small", cost=ROUND_TOKENS, name="small") for _ in range(30)]
    order = names(drain(queue_of(large, *small)))
    assert 8 <= order.index("large") <= 11


def test_who_is_barred_is_passed_over_until_readmitted() -> None:
    barred: set[Owner] = {("bulk", "a")}
    queue = queue_of(StubJob(tenant="a", name="a"), StubJob(tenant="b", name="b"), barred=barred)
    assert names(drain(queue)) == ["b"]
    barred.clear()
    queue.readmit(("bulk", "a"))
    assert names(drain(queue)) == ["a"]


def test_one_barred_while_first_in_line_gives_way() -> None:
    barred: set[Owner] = set()
    queue = queue_of(
        StubJob(tenant="a", name="a", deadline_s=1.0), StubJob(tenant="b", name="b"), barred=barred
    )
    first = queue.first()
    assert first is not None
    assert first.name == "a"
    barred.add(("bulk", "a"))
    assert names(drain(queue)) == ["b"]
    barred.clear()
    queue.readmit(("bulk", "a"))
    queue.readmit(("bulk", "a"))  # twice does no harm
    assert names(drain(queue)) == ["a"]


def test_what_must_not_run_any_more_is_skipped() -> None:
    jobs = [StubJob(name=str(n)) for n in range(4)]
    queue = queue_of(*jobs)
    assert queue.first() is jobs[0]
    jobs[0].waiting = jobs[2].waiting = False
    assert len(queue) == 2
    assert names(drain(queue)) == ["1", "3"]


def test_a_costly_job_that_is_cancelled_does_not_hold_up_those_behind_it() -> None:
    costly = StubJob(cost=100 * ROUND_TOKENS, deadline_s=1.0)
    queue = queue_of(costly, StubJob(name="cheap"), StubJob(name="other", tenant="other"))
    assert queue.first() is not None
    costly.waiting = False
    assert sorted(names(drain(queue))) == ["cheap", "other"]


def test_who_has_waited_too_long_is_given_up_once() -> None:
    queue = queue_of(StubJob(name="old"), patience=60.0)
    queue.put(StubJob(name="young"), 30.0)
    assert list(queue.overdue(59.0)) == []
    assert names(list(queue.overdue(60.0))) == ["old"]
    assert list(queue.overdue(61.0)) == []
    assert names(drain(queue)) == ["young"]


@pytest.mark.parametrize("patience", [math.inf, 1e9])
def test_memory_follows_what_waits_not_what_passed_by(patience: float) -> None:
    queue = queue_of(
        StubJob(name="patient"), patience=patience
    )  # the oldest: hides all others in the order of age
    for n in range(10_000):
        cancelled, quick = StubJob(deadline_s=1e9), StubJob(deadline_s=float(n))
        queue.put(cancelled, 0.0)  # hides behind all others in the order of deadlines
        queue.put(quick, 0.0)
        cancelled.waiting = False
        assert queue.first() is quick
        queue.pop()
    kept = sum(len(line.entries) for line in queue._lines.values()) + len(queue._by_age) + len(queue._offers)
    assert kept < 4 * COMPACT_AFTER


def test_tenants_that_have_gone_are_forgotten() -> None:
    queue = queue_of()
    for n in range(5000):
        queue.put(StubJob(tenant=f"t{n}"), 0.0)
        drain(queue)
    assert len(queue._lines) <= 1


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.sampled_from("abc"), st.integers(1, 3 * ROUND_TOKENS),
            st.one_of(st.none(), st.integers(0, 5)),
        ),
        st.tuples(st.just("take")),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("bar"), st.sampled_from("abc")),
        st.tuples(st.just("readmit"), st.sampled_from("abc")),
    ),
    max_size=80,
)  # fmt: skip


@given(steps)
def test_nothing_is_lost_nothing_twice_and_each_tenant_s_jobs_go_by_deadline(steps: list[tuple]) -> None:
    barred: set[Owner] = set()
    queue = queue_of(barred=barred)
    waiting: list[StubJob] = []  # a plain list beside it, in order of arrival

    def take() -> bool:
        job = queue.first()
        open_to = [each for each in waiting if ("bulk", each.tenant) not in barred]
        assert (job is None) == (not open_to), "somebody waits and nobody goes"
        if job is None:
            return False
        assert job in open_to
        own = [each for each in open_to if each.tenant == job.tenant]
        due = [math.inf if each.deadline_s is None else each.deadline_s for each in own]
        assert job is own[due.index(min(due))], (
            "a tenant's earliest deadline goes first, the oldest of equal ones"
        )
        assert queue.pop() is job
        waiting.remove(job)
        return True

    for step in steps:
        match step:
            case ("put", tenant, cost, deadline):
                job = StubJob(tenant=tenant, cost=cost, deadline_s=deadline)
                waiting.append(job)
                queue.put(job, 0.0)
            case ("take",):
                take()
            case ("cancel", index) if waiting:
                waiting.pop(index % len(waiting)).waiting = False
            case ("bar", tenant):
                barred.add(("bulk", tenant))
            case ("readmit", tenant) if ("bulk", tenant) in barred:
                barred.discard(("bulk", tenant))
                queue.readmit(("bulk", tenant))
        assert len(queue) == len(waiting)
    for owner in list(barred):
        barred.discard(owner)
        queue.readmit(owner)
    while take():
        pass
    assert not waiting


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(100, 2000), min_size=2),
    st.lists(st.integers(0, 3), min_size=20, max_size=60),
)
def test_backlogged_tenants_are_never_further_apart_than_a_round_and_a_job(
    costs: dict[str, int], deadlines: list[int]
) -> None:
    """DRR's bound: between two that always wait, tokens served differ by a round's tokens and the largest job at most."""
    queue = queue_of()
    tokens = 6 * ROUND_TOKENS
    for tenant, cost in costs.items():
        for n in range(tokens // cost + 1):
            queue.put(StubJob(tenant=tenant, cost=cost, deadline_s=deadlines[n % len(deadlines)]), 0.0)
    spent: Counter[str] = Counter()
    while max(spent.values(), default=0) < 5 * ROUND_TOKENS:
        assert queue.first() is not None
        job = queue.pop()
        spent[job.tenant] += job.cost
        assert max(spent.values()) - min(spent[tenant] for tenant in costs) <= ROUND_TOKENS + max(
            costs.values()
        )
