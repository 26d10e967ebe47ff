"""Ctrl-C, SIGTERM and a terminal that closes: a flag for whoever loops, an exception for whoever waits."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


class Stop(Event):
    """Set by the first signal; ``signal`` says which. A second Ctrl-C does what it does elsewhere."""

    signal: int | None = None


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """The flag, for the time of the ``with``."""
    stop = Stop()

    def set_flag(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number
        stop.set()

    with _handling([signal.SIGINT, *_endings()], set_flag):
        yield stop


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a terminal that closes raise KeyboardInterrupt, for the time of the ``with``.

    Within ``stop_on_signals``, too: there for what waits where it would not see the flag.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in the background of a script
    with _handling(_endings() if ignored else [signal.SIGINT, *_endings()], interrupt):
        yield


def _endings() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


@contextmanager
def _handling(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
