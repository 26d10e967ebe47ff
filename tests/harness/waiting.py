"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(seen: Callable[[], T]) -> T:
    """What `seen` returns once it is true; two minutes at most, however slow the machine."""
    deadline = time.monotonic() + 120
    while not (value := seen()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.05)
    return value
