"""What Postgres will not take: found, told, and kept from hurting its neighbours."""

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import attempt, body, job, jobs, outcome, rejection, state

from headrace.ledger import Ledger
from headrace.schemas import BatchClosed, BatchOpened, JobResult, JobState

# An index entry must fit a third of a page, compressed; this does neither.
TOO_LONG = "".join(f"{n * 7919 % 104729:x}" for n in range(4000))


@pytest.mark.parametrize(
    "bad", ["nul \0 inside", "half a pair \ud800", TOO_LONG], ids=["nul", "surrogate", "long"]
)
def test_a_refused_job_is_rejected_while_the_others_land(ledger: Ledger, bad: str) -> None:
    rows = jobs(9)
    worst = job(batch_id=bad) if bad == TOO_LONG else job(custom_id=bad)
    assert ledger.record([*rows[:4], worst, *rows[4:]]) == 9
    assert ledger.job(worst.id) is None
    if bad != TOO_LONG:  # not even its batch can be named there
        (told,) = ledger.rejections("acme", "b1")
        assert (told.code, told.src_offset) == ("ledger_rejected", worst.src_offset)


def test_a_refused_result_ends_as_ledger_rejected_while_the_others_land(ledger: Ledger) -> None:
    rows = jobs(9)
    ledger.begin([attempt(row) for row in rows])
    outcomes = [outcome(row) for row in rows]
    nul = outcome(rows[3], body=b'{"text": "a literal \\u0000"}')
    not_json = outcome(rows[7], body=b'{"text": NaN}')
    outcomes[3], outcomes[7] = nul, not_json
    done = ledger.finish(outcomes)
    assert done.changed == {row.id for n, row in enumerate(rows) if n not in (3, 7)}
    assert set(done.refused) == set(done.winners) == {rows[3].id, rows[7].id}
    for row in (rows[3], rows[7]):
        stored = ledger.job(row.id)
        assert stored is not None
        assert (stored.state, stored.error_code) == (JobState.FAILED, "ledger_rejected")
        told = JobResult.decode(done.winners[row.id])
        assert told.error is not None
        assert (told.state, told.error.code, told.id) == (JobState.FAILED, "ledger_rejected", row.id)
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert (batch.succeeded, batch.failed, batch.running) == (7, 2, 0)


def test_a_job_that_cannot_be_stored_at_all_is_told_and_left_out(ledger: Ledger) -> None:
    good, bad = job(), job(custom_id="\0")
    begun = ledger.begin([attempt(good), attempt(bad)])
    assert begun.started == {good.id}
    assert set(begun.refused) == {bad.id}
    done = ledger.finish([outcome(good), outcome(bad)])
    assert done.changed == {good.id}
    assert set(done.refused) == {bad.id}
    assert bad.id not in done.winners


def test_what_postgres_says_of_a_row_does_not_quote_it(ledger: Ledger) -> None:
    row = job()
    done = ledger.finish([outcome(row, body=b'{"answer": "my secret", "x": NaN}')])
    assert "secret" not in done.refused[row.id]
    assert b"secret" not in done.winners[row.id]


def test_messages_of_errors_are_cleaned(ledger: Ledger) -> None:
    row = job()
    ledger.finish([outcome(row, JobState.FAILED, error="nul \0 and \udfff")])
    stored = ledger.job(row.id)
    assert stored is not None
    assert stored.error == "nul � and �"


def test_rejections_are_cleaned(ledger: Ledger) -> None:
    ledger.reject([rejection(message="nul \0", custom_id="\ud800")])
    (told,) = ledger.rejections("acme", "b1")
    assert (told.message, told.custom_id) == ("nul �", "�")


def test_a_batch_is_opened_whatever_its_metadata_and_its_reference_hold(ledger: Ledger) -> None:
    ledger.apply_control(
        [BatchOpened(tenant="acme", batch_id="b1", input_ref="a\0b", metadata={"a\0": "b\0"})]
    )
    batch = ledger.batch("acme", "b1")
    assert batch is not None
    assert batch.opened_at is not None


def test_a_control_message_that_cannot_be_stored_is_told_while_the_others_land(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    bad = BatchClosed.model_construct(tenant="acme", batch_id="worst", expected=2**63)
    good = [BatchClosed(tenant="acme", batch_id=f"b{n}", expected=0) for n in range(5)]
    ledger.apply_control([*good[:2], bad, *good[2:]])
    closed = [ledger.batch("acme", message.batch_id) for message in good]
    assert all(batch is not None and batch.complete for batch in closed)
    assert "batch_closed" in caplog.text


def test_a_literal_backslash_u0000_survives(ledger: Ledger) -> None:
    row = job()
    text = r"a prompt about \u0000, with a \ and a tab" + "\t\r\n"
    given = orjson.dumps({**orjson.loads(body(row)), "metadata": {"text": text}})
    assert ledger.finish([outcome(row, body=given)]).changed
    result = ledger.result(row.id)
    assert result is not None
    assert orjson.loads(result.body)["metadata"]["text"] == text


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=st.text(st.characters(exclude_categories=[]), max_size=40), number=st.floats() | st.integers())
def test_no_text_and_no_number_in_a_result_breaks_its_write(ledger: Ledger, text: str, number: float) -> None:
    from headrace.schemas.wire import dump

    row = job()
    done = ledger.finish([outcome(row, body=dump({"text": text, text: number}))])
    assert done.changed == {row.id}
    assert state(ledger, row.id) is JobState.SUCCEEDED
