"""Whatever recorders and workers do, in whatever order: the table, its counters and its views agree with a model."""

from collections import Counter
from dataclasses import dataclass, replace

import postgres
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from rows import attempt, job, outcome, rejection

from headrace.ledger import JobRow, Ledger
from headrace.schemas import JobState

SLOTS = st.lists(st.integers(0, 5), min_size=1, max_size=8)
ENDS = st.sampled_from([state for state in JobState if state.terminal])


@dataclass
class Known:
    """What the model says of one job."""

    state: JobState
    attempt: int = 0


class Walk(RuleBasedStateMachine):
    """Six jobs of two batches; every third id is also sent with other content."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.url, pool_size=1)
        self.rows = [job(batch_id=f"b{number % 2}", tenant=f"t{id(self)}") for number in range(6)]
        self.known: dict[int, Known] = {}
        self.rejected: dict[int, str] = {}

    def teardown(self) -> None:
        self.ledger.close()

    def _impostor(self, slot: int) -> JobRow:
        row = self.rows[slot]
        return replace(row, content_sha=b"other", src_offset=row.src_offset + 1_000_000)

    @rule(slots=SLOTS)
    def record(self, slots: list[int]) -> None:
        new = set(slots) - self.known.keys()
        assert self.ledger.record([self.rows[slot] for slot in slots]) == len(new)
        self.known.update({slot: Known(JobState.QUEUED) for slot in new})

    @rule(slots=SLOTS)
    def record_other_content(self, slots: list[int]) -> None:
        mixed = [
            row for slot in slots if slot in self.known for row in (self._impostor(slot), self.rows[slot])
        ]
        assert self.ledger.record(mixed) == 0
        for row in mixed:
            if row not in self.rows:
                self.rejected[row.src_offset] = row.batch_id or ""

    @rule(offset=st.integers(5_000_000, 5_000_003))
    def reject(self, offset: int) -> None:
        new = self.ledger.reject([rejection(offset, tenant=self.rows[0].tenant, src_topic=f"{id(self)}")])
        assert new == (offset not in self.rejected)
        self.rejected[offset] = "b1"

    @rule(slots=SLOTS, ahead=st.integers(0, 2))
    def begin(self, slots: list[int], ahead: int) -> None:
        # `ahead` 1 is what a worker asks for that looked the job up; 0 and 2 are stale or made up.
        asked = {slot: self.known[slot].attempt + ahead if slot in self.known else 1 for slot in slots}
        begun = self.ledger.begin(
            [attempt(self.rows[slot], f"w{ahead}", attempt=asked[slot]) for slot in asked if asked[slot] > 0]
        )
        for slot, number in asked.items():
            known = self.known.get(slot)
            if known is None or (not known.state.terminal and number == known.attempt + 1):
                self.known[slot] = Known(JobState.RUNNING, number)
                assert self.rows[slot].id in begun
            elif known.state.terminal:
                assert self.rows[slot].id not in begun

    @rule(slots=SLOTS, end=ENDS)
    def finish(self, slots: list[int], end: JobState) -> None:
        live = {slot for slot in slots if slot not in self.known or not self.known[slot].state.terminal}
        done = self.ledger.finish([outcome(self.rows[slot], end) for slot in slots])
        assert done.changed == {self.rows[slot].id for slot in live}
        assert set(done.winners) == {self.rows[slot].id for slot in set(slots) - live}
        self.known.update({slot: Known(end) for slot in live})

    @rule(slot=st.integers(0, 5), end=ENDS)
    def finish_other_content(self, slot: int, end: JobState) -> None:
        if slot in self.known:
            done = self.ledger.finish([outcome(self._impostor(slot), end)])
            assert not done.changed
            assert not done.winners

    @invariant()
    def states_are_as_known(self) -> None:
        seen = self.ledger.lookup(self.rows, "nobody")
        told = {slot: seen[row.id].state for slot, row in enumerate(self.rows) if seen[row.id].state}
        assert told == {slot: known.state for slot, known in self.known.items()}

    @invariant()
    def counters_are_the_rows(self) -> None:
        for number in range(2):
            states = Counter(known.state for slot, known in self.known.items() if slot % 2 == number)
            rejected = sum(batch == f"b{number}" for batch in self.rejected.values())
            batch = self.ledger.batch(self.rows[0].tenant, f"b{number}")
            if batch is None:
                assert not states
                assert not rejected
                continue
            assert {state: getattr(batch, state) for state in JobState} == {
                state: states[state] for state in JobState
            }
            assert (batch.submitted, batch.rejected) == (states.total(), rejected)
            ended = sum(count for state, count in states.items() if state.terminal)
            assert batch.prompt_tokens == 10 * ended


def test_in_any_order_counters_views_and_rows_agree(postgres_server: postgres.Server) -> None:
    with postgres.clone(postgres_server) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Walk, "url", url)
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Walk,
            settings=settings(
                max_examples=12,
                stateful_step_count=12,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
