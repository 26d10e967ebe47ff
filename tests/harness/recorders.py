"""A recorder at work beside a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.ledger.recorder import Recorder

PATIENCE_S = 120.0


@contextmanager
def running(recorder: Recorder) -> Iterator[None]:
    """Run it on a thread while the block runs. It must not fail, and must end when it is told to."""
    stop, failure = threading.Event(), []

    def run() -> None:
        try:
            recorder.run(stop)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="recorder")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not failure, failure
