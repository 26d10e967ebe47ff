"""Writing a batch's results as JSON lines: each job that has ended once, and each record that was rejected."""

import time
from enum import StrEnum
from threading import Event
from typing import IO, TYPE_CHECKING, Any
from uuid import UUID

from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.output import count
from headrace.cli.promise import Promise
from headrace.cli.waiting import Waiting

if TYPE_CHECKING:
    from headrace.ledger import BatchProgress, Ledger, RejectionRow, StoredResult
    from headrace.store import Store

POLL_S = 1.0


class Format(StrEnum):
    """What a line looks like."""

    JSONL = "jsonl"
    OPENAI = "openai"


class Reader:
    """Reads results too large for a message from where they are kept.

    unread: the ids of those that could not be read; why of the first.
    """

    def __init__(self, store: "Store | None") -> None:
        self._store = store
        self.unread: list[UUID] = []
        self.why = ""

    def read(self, result: "StoredResult") -> bytes:
        """The encoded JobResult: the whole one, or where that cannot be had the one that refers to it."""
        from headrace.schemas import JobResult
        from headrace.store import StoreError

        reference = JobResult.decode(result.body).result_ref if result.uri is not None else None
        if reference is None:
            return result.body
        try:
            if self._store is None:
                raise StoreError("HEADRACE_RESULT_STORE is not set")
            return self._store.read(reference.uri, reference.bytes, reference.sha256)
        except StoreError as error:
            self.why = self.why or str(error)
            self.unread.append(result.id)
            return result.body

    def check(self) -> None:
        """Raise Failure if any could not be read."""
        if self.unread:
            raise Failure(
                Exit.NOT_FOUND,
                f"{count(len(self.unread), 'result')} too large for a message could not be read from where they are"
                f" kept; their lines say where (the first: {self.unread[0]}: {self.why}).",
                "Set HEADRACE_RESULT_STORE to the store that the workers have, and see that it can be read.",
            )


class Lines:
    """Results and rejected records, as lines of ``out``."""

    def __init__(self, out: IO[bytes], format: Format, reader: Reader) -> None:
        self._out, self._format, self._reader = out, format, reader

    def write_result(self, result: "StoredResult") -> None:
        """The line of a job that has ended."""
        from headrace.schemas import JobResult

        body = self._reader.read(result)
        self._write(JobResult.decode(body).to_openai() if self._format is Format.OPENAI else body)

    def write_rejection(self, row: "RejectionRow") -> None:
        """The line of a record that never became a job."""
        error = {"code": row.code, "message": row.message}
        if self._format is Format.OPENAI:
            id = f"batch_req_{row.src_partition}_{row.src_offset}"
            self._write({"id": id, "custom_id": row.custom_id, "response": None, "error": error})
        else:
            source = {"topic": row.src_topic, "partition": row.src_partition, "offset": row.src_offset}
            named = {} if row.custom_id is None else {"custom_id": row.custom_id}
            self._write({**named, "state": "rejected", "error": error, "source": source})

    def flush(self) -> None:
        """Let whoever reads ``out`` have what was written."""
        self._out.flush()

    def _write(self, line: bytes | dict[str, Any]) -> None:
        import orjson

        self._out.write((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n")


def write_results(
    ledger: "Ledger",
    tenant: str,
    batch_id: str,
    lines: Lines,
    *,
    promise: Promise | None,
    stop: Event,
    run: int | None = None,
) -> int:
    """Write what there is; with a ``promise`` go on until the batch is over, also while Postgres is away.

    run: write the results of this run of its jobs alone, and no rejections, which are of none. Returns the number of lines.
    """
    # Jobs do not end in the order of their ids, so each look reads all pages again; `written` costs one id a job.
    written: set[UUID | tuple[str, int, int]] = set()
    seen: tuple[int, ...] = ()
    waiting = Waiting(stop, batch_id, answered=True)

    def look() -> "BatchProgress | None":
        nonlocal seen
        batch = ledger.batch(tenant, batch_id)  # before the results: a complete batch has them all
        # Not their number alone: a line that was rejected may be mended, sent again, and end as a job.
        ended = () if batch is None else (batch.done, batch.rejected)
        if ended != seen:
            _write_new(ledger, tenant, batch_id, run, lines, written, stop)
            seen = ended
        return batch

    while True:
        began = time.monotonic()
        batch = look() if promise is None else waiting.ask(look)
        now = time.monotonic()
        looked = now - began
        if promise is None or stop.is_set() or promise.kept(batch):
            return len(written)
        waiting.look(now, batch)
        over = batch is not None and batch.over  # one more look, at counters alone
        stop.wait(POLL_S if over else max(POLL_S, 5 * looked))


def write_result(ledger: "Ledger", id: UUID, lines: Lines, *, follow: bool, stop: Event) -> int:
    """Write one job's result, waiting for it with ``follow``. Returns the number of lines, 0 or 1."""
    waiting = Waiting(stop, answered=follow)
    while (result := waiting.ask(lambda: ledger.result(id))) is None:
        if not follow or stop.wait(POLL_S):
            return 0
    lines.write_result(result)
    lines.flush()
    return 1


def _write_new(
    ledger: "Ledger",
    tenant: str,
    batch_id: str,
    run: int | None,
    lines: Lines,
    written: set[UUID | tuple[str, int, int]],
    stop: Event,
) -> None:
    for result in ledger.results(tenant, batch_id, run=run):
        if stop.is_set():
            break
        if result.id not in written:
            written.add(result.id)
            lines.write_result(result)
    for rejection in ledger.rejections(tenant, batch_id) if run is None else ():
        place = rejection.src_topic, rejection.src_partition, rejection.src_offset
        if place not in written:
            written.add(place)
            lines.write_rejection(rejection)
    lines.flush()
