"""Sending a file of prompts: what is asked before, what is said after, and what to do where it broke off."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from headrace.cli import context
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.output import count, note, numbers, printable

if TYPE_CHECKING:
    from headrace.client import Submission
    from headrace.schemas.unknown_fields import UnknownField
    from headrace.settings import Settings

SHOWN_PROBLEMS = 5
SHOWN_UNKNOWN = 20
DEFAULT_TENANT = "default"  # as settings and schemas have it, which are imported when they are needed


def send(
    settings: "Settings",
    lines: Iterable[bytes],
    tier: str,
    *,
    batch_id: str | None = None,
    idempotency_key: str | None = None,
    **options: Any,
) -> "Submission":
    """Submit ``lines``. Raises Failure for a tier that does not exist, and on a KeyboardInterrupt."""
    must_be_tier(settings, tier)
    client, sent = context.open_client(settings), None
    try:
        with client:
            sent = client.submit(lines, tier, batch_id=batch_id, idempotency_key=idempotency_key, **options)
        return sent
    except KeyboardInterrupt:
        if sent is not None:  # in the moment that it takes to close the client
            message = f"Stopped when batch {sent.batch_id} was sent: {count(sent.expected, 'job')} run."
            raise Failure(Exit.INTERRUPTED, message, about_batch(settings, "status", sent.batch_id)) from None
        message = f"Stopped when Kafka had confirmed {count(client.confirmed, 'job')}."
        raise Failure(Exit.INTERRUPTED, message, _how_to_go_on(settings, batch_id, idempotency_key)) from None


def about_batch(settings: "Settings", command: str, batch_id: str, *options: str) -> str:
    """A command about a batch, to be pasted into a shell."""
    tenant = () if settings.tenant == DEFAULT_TENANT else ("--tenant", settings.tenant)
    return shlex.join(["headrace", command, batch_id, *options, *tenant])


def must_be_tier(settings: "Settings", tier: str) -> None:
    """Raise Failure where there is no such tier."""
    if tier not in settings.tiers:
        raise Failure(Exit.USAGE, f"There is no tier {tier!r}.", f"Tiers are {', '.join(settings.tiers)}.")


def _how_to_go_on(settings: "Settings", batch_id: str | None, idempotency_key: str | None) -> str:
    """With a submit that was broken off; see Client.submit for what becomes of its batch."""
    if idempotency_key is not None:
        return "Give the same command with the same --idempotency-key to go on: nothing runs twice."
    if batch_id is None:
        return "What was sent is cancelled: submit the file again."
    return (
        f"What was sent runs, and batch {batch_id!r} stays open. To begin again end it with"
        f" `{about_batch(settings, 'cancel', batch_id, '--batch')}` and choose another --batch; a submit with --idempotency-key could be repeated as it is."
    )


def report_problems(submission: "Submission") -> None:
    """Say which lines will not succeed, those that were left out first."""
    for problem in sorted(submission.problems, key=lambda problem: not problem.left_out)[:SHOWN_PROBLEMS]:
        note(str(problem) + ("" if problem.sent else " (not sent)"))
    more = len(submission.problems) - SHOWN_PROBLEMS
    if more > 0:
        note(f"... and {more} more such lines; --json names all.")
    report_unknown(submission.unknown)
    if repeated := submission.repeated.count:
        first = submission.repeated.first_lines
        others = f" and {repeated - len(first)} more" if repeated > len(first) else ""
        verb = "repeats" if repeated == 1 else "repeat"
        note(
            f"{count(repeated, 'line')} (line {', '.join(map(str, first))}{others}) {verb} the custom_id of an earlier one: all run,"
            " and only their ids tell their results apart."
        )


def report_unknown(fields: "Sequence[UnknownField]") -> None:
    """Say which fields no job has."""
    for unknown in fields[:SHOWN_UNKNOWN]:
        note(printable(str(unknown)))
    if (more := len(fields) - SHOWN_UNKNOWN) > 0:
        note(f"... and {count(more, 'more such field')}; --json names them.")


def check_sent(submission: "Submission") -> None:
    """Raise Failure if lines were left out of the batch: its results say nothing of them."""
    left_out = [problem for problem in submission.problems if problem.left_out]
    if left_out:
        told = numbers([problem.line for problem in left_out])
        raise Failure(
            Exit.USAGE,
            f"{count(len(left_out), 'line')} could not be sent ({told}), the first because {left_out[0].message}.",
            "The others run. Mend these, and submit them as a batch of their own.",
        )


def parse_deadline(text: str) -> datetime:
    """A point in time, from a duration from now or from RFC 3339. Raises Failure."""
    from headrace.schemas.envelope import parse_deadline as parse

    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        if text[-1:] in units and text[:-1].replace(".", "", 1).isdigit():
            return datetime.now(UTC) + timedelta(seconds=float(text[:-1]) * units[text[-1]])
        return parse(text)
    except (ValueError, OverflowError):
        raise Failure(
            Exit.USAGE,
            f"--deadline {text!r} is no time.",
            "Write a duration such as 90s, 30m, 2h or 1d, or a time with a zone such as 2027-01-31T12:00:00Z.",
        ) from None


def as_json(submission: "Submission", tier: str, refused: list[int]) -> dict[str, Any]:
    """What `--json` tells of a batch that was sent. refused: numbers of the lines that do not run."""
    return {
        "tenant": submission.tenant,
        "batch_id": submission.batch_id,
        "tier": tier,
        "expected": submission.expected,
        "not_sent": sum(problem.left_out for problem in submission.problems),
        "repeated_custom_ids": submission.repeated.count,
        "problems": [asdict(problem) for problem in submission.problems],
        "unknown_fields": [asdict(unknown) for unknown in submission.unknown],
        "refused": refused,
    }
