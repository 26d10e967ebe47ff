"""Workers and a recorder as processes, traffic for them, and the books that must balance afterwards.

A stress test starts a fleet, sends it thousands of records, does its worst to it meanwhile, and then settles:

    fleet.start(workers=2)
    fleet.send(3000)
    ...                      # the fault
    fleet.settle()           # every record is answered for, every offset committed, every process stopped cleanly
    fleet.assert_books_balance()

Tests wait for conditions, never for times, so that a slow machine makes them slower and not red.
"""

import io
import itertools
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeAlias

import orjson
import psycopg
from pipeline import Pipeline, pipeline

from headrace.cli.results import Format, Lines, Reader, write_results
from headrace.ledger import BatchProgress, LedgerUnavailable
from headrace.schemas import BatchClosed, BatchOpened, JobResult, topics, uuid7
from headrace.store import open_store

Process: TypeAlias = "subprocess.Popen[bytes]"

TIERS = ("interactive", "standard", "bulk")
BATCH = "b"
ENGINE = {"latency_s": 0.5, "slots": 64}  # answers come out of order, some 250 a second
PATIENCE_S = 240.0

KNOWN = "SELECT count(*) FROM workers WHERE worker LIKE %s"


class Fleet:
    """Some workers, mostly a recorder, and one batch of jobs.

    Args:
        engine: the stand-in engines' arguments.
        ledger: the arguments of every process's Ledger.
        config: fields of every worker's WorkerConfig.
    """

    def __init__(
        self,
        line: Pipeline,
        engine: Mapping[str, Any] = ENGINE,
        ledger: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.line, self.engine, self.ledger, self.config = line, engine, ledger, config
        self.workers: list[Process] = []
        self.recorder: Process | None = None
        self.expected: dict[str, str] = {}  # how each job must end, by its custom id
        self.rubbish: set[bytes] = set()  # records that are no jobs
        self.killers: set[bytes] = set()  # jobs that are to fail as engine_failure
        self.supervised = False  # whether a process that ends by itself is replaced, and counted in `deaths`
        self.deaths = 0
        self._numbers = itertools.count()

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, workers: int = 2, recorder: bool = True) -> None:
        """Start a recorder, and so many workers."""
        if recorder:
            self.recorder = self.start_recorder()
        for _ in range(workers):
            self.join()

    def join(self) -> Process:
        """One more worker."""
        self.workers.append(self.start_worker())
        return self.workers[-1]

    def start_worker(self, crash: str | None = None, **config: Any) -> Process:
        """A worker that ``settle`` knows nothing of."""
        told = {**self.config, **config}
        return self.line.start_process(self.engine, crash=crash, ledger=self.ledger, **told)

    def start_recorder(self, crash: str | None = None) -> Process:
        """A recorder that ``settle`` knows nothing of."""
        return self.line.start_process(role="recorder", crash=crash, ledger=self.ledger)

    def leave(self, worker: Process) -> None:
        """One worker less, in good order; one that has only just been started is given time to begin."""
        self.wait(lambda: self.count(KNOWN, name_of(worker)), "the worker has signed on")
        self.workers.remove(worker)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(120) == 0

    def kill(self, *processes: Process) -> None:
        """kill -9, all at once; others take their places."""
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            self._replace(process)

    def _replace(self, process: Process) -> None:
        if process is self.recorder:
            self.recorder = self.start_recorder()
        else:
            self.workers[self.workers.index(process)] = self.start_worker()

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *([] if self.recorder is None else [self.recorder])]

    # --- traffic ------------------------------------------------------------------------------------------------------

    def send(self, count: int, **clock: Any) -> None:
        """So many records: some fail, some are no jobs, some come twice, and they are named in each way there is."""
        if not self.expected:
            self.line.control(BatchOpened(batch_id=BATCH))
        for number in itertools.islice(self._numbers, count):
            place = {"tier": TIERS[number % 3], "partition": number // 3 % 4, **clock}
            if number % 50 == 7:
                self._send_rubbish(b"{no json %d" % number, place)
            else:
                self.submit("fail:no_good" if number % 50 == 3 else f"prompt {number}", place, number)
        self.line.flush()

    def submit(self, prompt: str, place: Mapping[str, Any], number: int | None = None) -> None:
        """One job; its prompt may script its fate (see standin)."""
        number = next(self._numbers) if number is None else number
        custom_id = f"c{number}"
        named = [{"job_id": str(uuid7())}, {"job_id": f"job-{number}"}, {}][number // 7 % 3]
        job = {"prompt": prompt, "batch_id": BATCH, "custom_id": custom_id, **named}
        self.expected[custom_id] = "failed" if prompt.startswith(("fail", "die")) else "succeeded"
        if prompt.startswith("die"):
            self.killers.add(json.dumps(job).encode())
        for _ in range(2 if named and number % 40 == 11 else 1):
            self.line.send(json.dumps(job).encode(), **place)

    def _send_rubbish(self, value: bytes, place: Mapping[str, Any]) -> None:
        self.rubbish.add(value)
        self.line.send(value, headers=[(topics.BATCH_ID, BATCH.encode())], **place)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
        """Return once ``condition`` holds. Postgres may be away meanwhile; no process may end unless supervised."""
        until = time.monotonic() + seconds
        while not self._holds(condition):
            self._see_to_the_dead()
            assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
            time.sleep(0.2)

    def _see_to_the_dead(self) -> None:
        for process in [process for process in self.processes if process.poll() is not None]:
            assert self.supervised, f"a process ended by itself: {process.args}"
            self.deaths += 1
            self._replace(process)

    def _holds(self, condition: Callable[[], object]) -> bool:
        try:
            return bool(condition())
        except (psycopg.OperationalError, LedgerUnavailable):
            return False

    def ended(self) -> int:
        """How many jobs have."""
        return self.count("SELECT count(*) FROM jobs WHERE state > 1")

    def wait_ended(self, count: int) -> None:
        """Return once so many jobs have ended."""
        self.wait(lambda: self.ended() >= count, f"{count} jobs have ended")

    def count(self, sql: str, *values: Any) -> int:
        ((number,),) = self.line.query(sql, *values)
        return int(number)

    def batch(self) -> BatchProgress | None:
        """What is counted of the batch."""
        return self.line.ledger.batch("default", BATCH)

    def lag(self) -> int:
        """Records whose offset is not committed, over all tiers."""
        return sum(map(self.line.lag, TIERS))

    def settle(self, seconds: float = PATIENCE_S) -> None:
        """Close the batch; return when every record is answered for, every offset committed, and all have stopped."""
        self.finish(seconds)
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(120) for process in self.processes] == [0] * len(self.processes)

    def finish(self, seconds: float = PATIENCE_S) -> None:
        """The same, and let the processes run."""
        expected = len(self.expected) + len(self.rubbish)
        self.line.control(BatchClosed(batch_id=BATCH, expected=expected))
        self.wait(lambda: (batch := self.batch()) and batch.complete, "the batch is complete", seconds)
        self.wait(lambda: self.lag() == 0, "every offset is committed", seconds)

    # --- the books ----------------------------------------------------------------------------------------------------

    def assert_books_balance(self, run_again: int = 0) -> None:
        """Every job has one row, ended as it must; the counters are the rows; the results topic has what the table
        has; output and error lines are as many as the input's; and nothing was run again but what was in flight.

        run_again: attempts there may be for which no earlier one was lost: given back, or a sleeper's.
        """
        self._assert_rows()
        self._assert_counters()
        self._assert_results()
        self._assert_lines()
        self._assert_dead_letters()
        again = self.count("SELECT count(*) - count(DISTINCT (id, run)) FROM attempts")
        lost = self.count("SELECT count(*) FROM attempts WHERE ended_at IS NULL OR died")
        assert again <= lost + run_again

    def _assert_rows(self) -> None:
        rows = self.line.query("SELECT custom_id, state::text FROM job_status WHERE batch_id = %s", BATCH)
        assert len(rows) == len(self.expected)
        assert dict(rows) == self.expected

    def _assert_counters(self) -> None:
        batch = self.batch()
        assert batch is not None
        assert (batch.submitted, batch.rejected) == (len(self.expected), len(self.rubbish))
        states = Counter(self.expected.values())
        counted = {name: getattr(batch, name) for name in ("succeeded", "failed", "cancelled", "expired")}
        assert counted == {name: states[name] for name in counted}
        assert (batch.queued, batch.running) == (0, 0)
        sums = "sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens)"
        tokens = self.line.query(f"SELECT {sums} FROM jobs")
        assert [(batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens)] == tokens
        assert {(tier.queued, tier.running) for tier in self.line.ledger.backlog()} == {(0, 0)}

    def _assert_results(self) -> None:
        """A job may be published again; every copy is the answer that the table holds."""
        stored = self.line.query("SELECT id, run, body::text FROM results")
        table = {(id, run): JobResult.decode(body.encode()) for id, run, body in stored}
        published = [JobResult.decode(m.value()) for m in self.line.everything(self.line.topics.results)]
        assert {(result.id, result.run) for result in published} == table.keys()
        assert [result for result in published if result != table[result.id, result.run]] == []

    def _assert_lines(self) -> None:
        out = io.BytesIO()
        kept_in = self.config.get("result_store")
        reader = Reader(open_store(kept_in) if kept_in else None)
        written = Lines(out, Format.OPENAI, reader)
        write_results(self.line.ledger, "default", BATCH, written, promise=None, stop=Event())
        lines = [orjson.loads(line) for line in out.getvalue().splitlines()]
        output = [line for line in lines if line["error"] is None]
        assert len(lines) == len(self.expected) + len(self.rubbish)
        assert len(output) == Counter(self.expected.values())["succeeded"]

    def _assert_dead_letters(self) -> None:
        """A letter may be published again; nobody is named in one who should not be."""
        letters = self.line.everything(self.line.topics.dead)
        assert {letter.value() for letter in letters} == self.rubbish | self.killers
        codes = {letter.value(): dict(letter.headers())[topics.DEAD_CODE] for letter in letters}
        assert {value for value, code in codes.items() if code == b"engine_failure"} == self.killers


def name_of(worker: Process) -> str:
    """A worker's name in the table, as a pattern: its host, its pid and something random."""
    return f"%-{worker.pid}-%"


@contextmanager
def fleet(bootstrap: str, database_url: str, **given: Any) -> Iterator[Fleet]:
    """A fleet on topics of its own; whatever is left of it is killed at the end."""
    with pipeline(bootstrap, database_url) as line:
        yield Fleet(line, **given)


MakeFleet: TypeAlias = Callable[..., Fleet]
