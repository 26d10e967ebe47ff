"""Watching a batch until it is complete: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import TYPE_CHECKING

from headrace.cli.pace import Glance, Pace
from headrace.cli.promise import Promise
from headrace.cli.waiting import Waiting

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headrace.ledger import BatchProgress, Ledger

POLL_S = 0.5
PLAIN_S = 2.0


def follow(
    ledger: "Ledger",
    tenant: str,
    batch_id: str,
    stop: Event,
    *,
    promise: Promise | None = None,
    quiet: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> "BatchProgress | None":
    """Return the batch once it is over, or as it is when ``stop`` is set.

    promise: what was sent of the batch, where the recorder may not have read it yet. meanwhile is called at each
    look, and may raise. Raises LedgerUnavailable where Postgres is away at the first look; later it is waited for.
    """
    promise = promise or Promise()
    pace, waiting = Pace(), Waiting(stop, batch_id)
    batch = None
    with _view(batch_id, quiet) as show:
        while True:
            meanwhile()
            batch = waiting.ask(lambda: ledger.batch(tenant, batch_id)) or batch
            now = time.monotonic()
            if batch is not None:
                pace.expected = promise.expected or None
                show(pace.look(now, batch))
            if promise.kept(batch):
                return batch
            waiting.look(now, batch)
            if stop.wait(POLL_S):
                return batch


def sentence(glance: Glance) -> str:
    """One look, as a line of text."""
    parts = [
        f"{glance.ended}/{'?' if glance.total is None else glance.total} ended",
        *(f"{count} {name}" for name, count in _worth_showing(glance)),
        f"{glance.running} running",
        f"{glance.queued} queued",
        f"{glance.tokens_per_s:.0f} tokens/s",
    ]
    if glance.eta_s:
        parts.append(f"ETA {duration(glance.eta_s)}")
    return ", ".join(parts)


def _worth_showing(glance: Glance) -> list[tuple[str, int]]:
    """What most batches have, and what this one has besides."""
    return [(name, count) for name, count in glance.outcomes.items() if count or name in ("done", "failed")]


def duration(seconds: float) -> str:
    """``seconds`` for people: 8s, 3m 20s, 2h 05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02}m"


def _view(batch_id: str, quiet: bool) -> "AbstractContextManager[Callable[[Glance], None]]":
    if quiet:
        return nullcontext(lambda glance: None)
    return _Live(batch_id) if sys.stderr.isatty() else nullcontext(_Plain(batch_id))


class _Plain:
    """A line whenever something has changed, at most one in PLAIN_S; the last one always."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id
        self._counts: tuple[int, ...] = ()
        self._due = 0.0

    def __call__(self, glance: Glance) -> None:
        counts = (glance.ended, glance.running, glance.queued)
        now = time.monotonic()
        over = glance.ended == glance.total
        if counts != self._counts and (over or now >= self._due):
            self._counts, self._due = counts, now + PLAIN_S
            print(f"{self._batch_id}: {sentence(glance)}", file=sys.stderr, flush=True)


class _Live:
    """A bar and a line of figures that stay in place; the only thing in Headrace that takes the terminal."""

    def __init__(self, batch_id: str) -> None:
        from rich.live import Live

        from headrace.cli.output import messages

        self._batch_id = batch_id
        self._live = Live(console=messages(), refresh_per_second=8, transient=False)

    def __enter__(self) -> Callable[[Glance], None]:
        self._live.__enter__()
        return self._show

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def _show(self, glance: Glance) -> None:
        self._live.update(self._render(glance))

    def _render(self, glance: Glance) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        share = f"{glance.ended}/{'?' if glance.total is None else glance.total}"
        line.add_row(
            Text(self._batch_id, style="bold"),
            ProgressBar(total=glance.total or 1, completed=glance.ended, width=40),
            share,
        )
        figures = Text()
        for name, count in _worth_showing(glance):
            figures.append(f"{count} {name}", style="green" if name == "done" else "red" if count else "")
            figures.append(" · ")
        eta = duration(glance.eta_s) if glance.eta_s else "-"
        figures.append(
            f"{glance.running} running · {glance.queued} queued · {glance.tokens_per_s:.0f} tokens/s · ETA {eta}"
        )
        return Group(line, figures)
