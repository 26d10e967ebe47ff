"""What a submit says where it is broken off, and what it advises."""

from types import SimpleNamespace
from typing import Any, Self

import pytest

from headrace.cli import submission
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.input import open_input
from headrace.settings import Settings


class ClosedSlowly:
    """A client that has sent everything when its user presses Ctrl-C."""

    confirmed = 6

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        raise KeyboardInterrupt

    def submit(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(batch_id="b 1", expected=6)


def test_a_batch_that_was_sent_when_it_was_broken_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission.context, "open_client", lambda settings: ClosedSlowly())
    with pytest.raises(Failure) as failure:
        submission.send(Settings(tenant="acme"), [], "standard")
    assert failure.value.exit_code == Exit.INTERRUPTED
    assert "batch b 1 was sent: 6 jobs run" in failure.value.message
    assert failure.value.remedy == "headrace status 'b 1' --tenant acme"


def test_a_command_that_is_advised_names_the_tenant_where_it_is_not_the_default() -> None:
    assert submission.about_batch(Settings(), "results", "b1", "--follow") == "headrace results b1 --follow"
    assert (
        submission.about_batch(Settings(tenant="a b"), "status", "b1") == "headrace status b1 --tenant 'a b'"
    )


def test_a_stdin_that_is_closed_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(Failure, match="stdin is closed"), open_input("-", "headrace submit -"):
        pass
