"""Panics of libraries written in Rust (tokenizers, llguidance), as errors that end one request.

PyO3 raises a panic as ``PanicException``, which is no ``Exception``: uncaught it would end the process. But a prompt or a
grammar that provokes one is a reason to fail its request, and no other.
"""

from types import TracebackType


class LibraryPanic(Exception):
    """A library met a defect of its own. The cause says where, and may quote what the library was given."""


class PanicsAsErrors:
    """A context manager for calls of such a library. Raises LibraryPanic for a panic, and lets all else pass.

    A class, since a generator would take longer than some of the calls.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # By its name: each library has a class of its own, and none of them can be imported.
        if kind is not None and kind.__name__ == "PanicException":
            raise LibraryPanic("a library panicked") from error


panics_as_errors = PanicsAsErrors()
"""Has no state: one serves all calls."""
