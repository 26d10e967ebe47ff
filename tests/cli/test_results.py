"""Results as JSON lines: each job once, rejected records too, as they end or when all have."""

import io
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Event
from uuid import uuid4

import orjson
import pytest

from headrace.cli import results
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.promise import Promise
from headrace.cli.results import POLL_S, Format, Lines, Reader, write_results
from headrace.client.announced import Announced
from headrace.ledger import BatchProgress, BatchState, RejectionRow, StoredResult
from headrace.schemas import Choice, JobResult, JobState, Reference
from headrace.store import Store, open_store


class Table:
    """A ledger of one batch; each look at the batch moves on to the next of ``stages``: how many have ended."""

    def __init__(self, total: int, stages: list[int], rejected: int = 0) -> None:
        self.rows = [self._row(number) for number in range(total)]
        self.stages = stages
        self.rejected = rejected
        self.ended = 0

    def _row(self, number: int) -> StoredResult:
        body = JobResult(
            id=uuid4(), custom_id=f"c{number}", state=JobState.SUCCEEDED, model="m",
            choices=[Choice(text=f"answer {number}", finish_reason="stop")],
        )  # fmt: skip
        return StoredResult(body.id, 1, body.custom_id, JobState.SUCCEEDED, body.encode())

    def batch(self, tenant: str, batch_id: str) -> BatchProgress:
        self.ended = self.stages.pop(0) if self.stages else self.ended
        complete = self.ended == len(self.rows)
        return BatchProgress(
            tenant=tenant, batch_id=batch_id, state=BatchState.COMPLETE if complete else BatchState.CLOSED,
            expected=len(self.rows) + self.rejected, submitted=len(self.rows), queued=0, running=0,
            succeeded=self.ended, failed=0, cancelled=0, expired=0, rejected=self.rejected, prompt_tokens=0,
            cached_tokens=0, completion_tokens=0, opened_at=None, closed_at=None,
        )  # fmt: skip

    def results(self, tenant: str, batch_id: str, run: int | None) -> Iterator[StoredResult]:
        # Those that ended last come first, as ids may have it.
        return reversed(self.rows[: self.ended])

    def rejections(self, tenant: str, batch_id: str) -> list[RejectionRow]:
        return [RejectionRow("t", 0, n, "default", "invalid_json", "not JSON") for n in range(self.rejected)]


def write(
    table: Table, format: Format = Format.JSONL, *, follow: bool = False, reader: Reader | None = None
) -> list[dict[str, object]]:
    out = io.BytesIO()
    written = Lines(out, format, reader or Reader(None))
    promise = Promise() if follow else None
    count = write_results(table, "default", "b", written, promise=promise, stop=Event())  # type: ignore[arg-type]
    lines = [orjson.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == count
    return lines


def test_what_has_ended_is_written_once_and_no_more_waited_for() -> None:
    lines = write(Table(4, [2]))
    assert sorted(str(line["custom_id"]) for line in lines) == ["c0", "c1"]


def test_a_complete_batch_is_looked_at_once_more_without_waiting_for_as_long_as_it_took_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, pauses = [0.0], []

    class Slow(Table):
        def results(self, tenant: str, batch_id: str, run: int | None) -> Iterator[StoredResult]:
            clock[0] += 60.0
            return super().results(tenant, batch_id, run)

    class Stop(Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return False

    monkeypatch.setattr("headrace.cli.results.time.monotonic", lambda: clock[0])
    lines = Lines(io.BytesIO(), Format.JSONL, Reader(None))
    promise = Promise(unread=lambda: Announced("default", "b"))
    assert write_results(Slow(4, [2, 4, 4]), "default", "b", lines, promise=promise, stop=Stop()) == 4  # type: ignore[arg-type]
    assert pauses == [5 * 60.0, POLL_S]


def test_following_writes_each_job_once_in_the_order_of_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "POLL_S", 0.01)
    lines = write(Table(5, [0, 2, 2, 5]), follow=True)
    assert {str(line["custom_id"]) for line in lines[:2]} == {"c0", "c1"}
    assert len({line["id"] for line in lines}) == 5


def test_rejected_records_are_lines_too() -> None:
    lines = write(Table(1, [1], rejected=2))
    assert [line["state"] for line in lines] == ["succeeded", "rejected", "rejected"]
    assert lines[1]["error"] == {"code": "invalid_json", "message": "not JSON"}


def test_openais_format_has_a_response_or_an_error() -> None:
    answered, rejected = write(Table(1, [1], rejected=1), Format.OPENAI)
    assert answered["custom_id"] == "c0"
    assert answered["response"]["status_code"] == 200  # type: ignore[index]
    assert answered["error"] is None
    assert rejected["response"] is None
    assert rejected["error"]["code"] == "invalid_json"  # type: ignore[index]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def kept_elsewhere(table: Table, store: Store) -> None:
    """Make the table refer to its first result."""
    row = table.rows[0]
    reference = Reference(
        uri=store.uri("large.json"), bytes=len(row.body), sha256=sha256(row.body).hexdigest()
    )
    store.write("large.json", row.body)
    body = JobResult.decode(row.body).kept_at(reference).encode()
    table.rows[0] = replace(row, body=body, uri=reference.uri)


@pytest.mark.parametrize("format", Format)
def test_a_large_result_is_read_from_where_it_is_kept(store: Store, format: Format) -> None:
    table, reader = Table(2, [2]), Reader(store)
    whole = write(Table(2, [2]), format)
    kept_elsewhere(table, store)
    lines = write(table, format, reader=reader)
    texts = [str(line).partition("answer 0")[1] for line in lines]
    assert texts == [str(line).partition("answer 0")[1] for line in whole]
    reader.check()


@pytest.mark.parametrize("fault", ["no store", "gone", "altered", "elsewhere"])
def test_a_large_result_that_cannot_be_read_is_a_line_that_says_where_it_is(
    fault: str, store: Store, tmp_path: Path
) -> None:
    table = Table(2, [2])
    kept_elsewhere(table, store)
    file = tmp_path / "large.json"
    if fault == "gone":
        file.unlink()
    elif fault == "altered":
        file.write_bytes(file.read_bytes().replace(b"answer", b"ANSWER"))
    elif fault == "elsewhere":
        store = open_store(str(tmp_path / "another"))
    for format in Format:
        reader = Reader(None if fault == "no store" else store)
        other, large = write(table, format, reader=reader)
        assert "answer 1" in str(other)
        assert table.rows[0].uri in str(large)
        assert large.get("response") is None
        with pytest.raises(Failure, match="1 result too large") as failure:
            reader.check()
        assert failure.value.exit_code is Exit.NOT_FOUND
