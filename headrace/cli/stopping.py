"""Ctrl-C, SIGTERM and a terminal that closes set a flag; whoever loops looks at it."""

import signal
from collections.abc import Iterator
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

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, set_flag) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
