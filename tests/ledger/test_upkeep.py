"""The recorder's upkeep of the table: what fails comes again and is seen, and a defect is not hidden."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import psycopg
import pytest
from prometheus_client import generate_latest
from waiting import eventually

from headrace.ledger import Ledger, LedgerUnavailable, NotMigrated, TierBacklog
from headrace.ledger import upkeep as upkeep_module
from headrace.ledger.upkeep import Chore, Upkeep, chores
from headrace.ledger.watch import CHORES, RecorderMetrics


def failing(times: int, error: Exception) -> Callable[[], None]:
    """Work that fails so many times, then goes well."""
    left = [error] * times

    def work() -> None:
        if left:
            raise left.pop()

    return work


def failures(metrics: RecorderMetrics, chore: str) -> float | None:
    return metrics.registry.get_sample_value("headrace_recorder_upkeep_failures_total", {"kind": chore})


@pytest.mark.parametrize("error", [LedgerUnavailable("a lock"), psycopg.errors.ObjectInUse("busy")])
def test_what_fails_is_told_and_comes_again_while_the_rest_is_done(error: Exception) -> None:
    metrics, stop, done = RecorderMetrics(), threading.Event(), threading.Event()
    upkeep = Upkeep(
        [
            Chore("partitions", failing(2, error), 3600, 0.01),
            Chore("drain", done.set, 3600, 3600),
            Chore("retire", failing(1, error), 3600, 3600),
        ],
        metrics,
    )
    upkeep.start(stop)
    eventually(lambda: failures(metrics, "partitions") == 2 and "partitions" not in metrics.upkeep_failing)
    assert done.is_set()
    assert failures(metrics, "retire") == 1
    assert metrics.upkeep_failing == {"retire": str(error)}
    upkeep.check()
    stop.set()
    for thread in upkeep._threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [NotMigrated("no tables"), ZeroDivisionError()])
def test_what_no_time_mends_is_raised_by_check(error: Exception) -> None:
    upkeep = Upkeep([Chore("partitions", failing(1, error), 3600, 3600)], RecorderMetrics())
    upkeep.start(threading.Event())
    for thread in upkeep._threads:
        thread.join(120)
    with pytest.raises(type(error)):
        upkeep.check()


def test_the_backlog_is_told_while_an_old_day_is_read(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, let_go, told = threading.Event(), threading.Event(), threading.Event()

    def retire(keep: timedelta) -> list[str]:
        reading.set()
        let_go.wait()
        return []

    def backlog() -> list[TierBacklog]:
        if reading.is_set():
            told.set()
        return []

    metrics, stop = RecorderMetrics(), threading.Event()
    monkeypatch.setattr(ledger, "retire", retire)
    monkeypatch.setattr(ledger, "backlog", backlog)
    mine = chores(ledger, metrics, timedelta(days=90))
    for chore in mine:
        if chore.name == "backlog":
            chore.every = 0.01
    upkeep = Upkeep(mine, metrics)
    upkeep.start(stop)
    try:
        assert told.wait(120)
    finally:
        stop.set()
        let_go.set()
        for thread in upkeep._threads:
            thread.join(120)


def test_a_stop_waits_for_all_chores_together_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing, waits = failing(0, ZeroDivisionError()), list[float]()
    upkeep = Upkeep(
        [Chore("backlog", nothing, 3600, 3600), Chore("retire", nothing, 3600, 3600, long=True)],
        RecorderMetrics(),
    )
    clock = iter([100.0, 100.0, 103.0])  # at first, and before each of the two is waited for
    monkeypatch.setattr(upkeep_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for thread in upkeep._threads:
        monkeypatch.setattr(thread, "join", waits.append)
    upkeep.join()
    assert waits == [upkeep_module.STOP_S, upkeep_module.STOP_S - 3]


def test_the_chores_of_a_recorder_are_those_it_has_metrics_of(ledger: Ledger) -> None:
    metrics = RecorderMetrics()
    mine = chores(ledger, metrics, timedelta(days=90))
    assert [chore.name for chore in mine] == list(CHORES)
    for chore in mine:
        chore.work()
    assert b'headrace_recorder_upkeep_age_seconds{kind="retire"}' in generate_latest(metrics.registry)
