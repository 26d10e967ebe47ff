"""What the job table knows of earlier sendings of a batch or a key.

Submitting needs no job table: where it cannot be asked, for whatever reason, nothing is known, and nothing is refused.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from headrace.cli import context
from headrace.cli.errors import Failure, translate
from headrace.cli.exits import Exit
from headrace.cli.output import count, note, numbers
from headrace.cli.submission import about_batch

if TYPE_CHECKING:
    from uuid import UUID

    from headrace.client import Submission
    from headrace.ledger import BatchProgress, Ledger
    from headrace.settings import Settings

_Answer = TypeVar("_Answer")


def refuse_cancelled(settings: "Settings", batch_id: str | None, idempotency_key: str | None) -> None:
    """Raise Failure if the batch that these name was cancelled."""
    from headrace.client.client import batch_named_by

    if batch_id is None and idempotency_key is not None:
        batch_id = batch_named_by(settings.tenant, idempotency_key)
    if batch_id is None:
        return
    if _ask(settings, lambda ledger: ledger.is_cancelled(settings.tenant, batch_id)):
        raise Failure(
            Exit.REFUSED,
            f"Batch {batch_id} is cancelled; nothing of it would run.",
            "Choose another --batch or --idempotency-key.",
        )


def refuse_used(settings: "Settings", batch_id: str) -> None:
    """Raise Failure if the job table says that the batch is closed or has jobs.

    The count of a closed one is final. One that is open and has jobs is what a submit that was broken off leaves behind:
    without an idempotency key a line has another id each time, and would run twice.
    """
    batch: BatchProgress | None = _ask(settings, lambda ledger: ledger.batch(settings.tenant, batch_id))
    if batch is None:
        return
    if batch.closed_at is not None:
        raise Failure(
            Exit.REFUSED,
            f"Batch {batch_id!r} was closed with {count(batch.expected or 0, 'record')}; what comes later would not be waited for.",
            "Choose another --batch; to go on with a submit that broke off, give its --idempotency-key again.",
        )
    if held := batch.submitted + batch.rejected:
        raise Failure(
            Exit.REFUSED,
            f"Batch {batch_id!r} is open and has {count(held, 'record')} already: sent again, lines would run twice.",
            "To go on with a submit that broke off, give its --idempotency-key again. If it had none, choose another --batch,"
            f" and end what runs with `{about_batch(settings, 'cancel', batch_id, '--batch')}`.",
        )


class Refused:
    """Lines that do not run, since their ids are those of jobs with other content; by id with the batches of those jobs."""

    def __init__(self, submission: "Submission", others: "dict[UUID, str | None]") -> None:
        self._batch_id = submission.batch_id
        self._sent = len(submission.lines)
        self._batches = set(others.values())
        self.lines = sorted(submission.lines[id].number for id in others)

    def check(self) -> None:
        """Raise Failure if there are any."""
        if not self.lines:
            return
        told = f"{count(len(self.lines), 'line')} of {self._sent} ({numbers(self.lines)})"
        if elsewhere := sorted(str(name) for name in self._batches - {self._batch_id}):
            raise Failure(
                Exit.REFUSED,
                f"{told} did not run: their idempotency key or job_id was used before, in batch {elsewhere[0]}.",
                "Give that --batch to go on with it, or another --idempotency-key to run them anew.",
            )
        raise Failure(
            Exit.REFUSED,
            f"{told} did not run: they were sent before with other content under their idempotency key or job_id, and what"
            " the batch has is the answer to that.",
            "Submit these lines under another --idempotency-key.",
        )


def refused(ledger: "Ledger", submission: "Submission") -> Refused:
    """The lines that do not run, as far as the job table has read them and their forerunners."""
    return Refused(submission, ledger.other_content(_known_to_others(submission)))


def refused_so_far(settings: "Settings", submission: "Submission", *, quiet: bool = False) -> Refused:
    """The same of a batch that is not waited for. quiet: say nothing where the job table named does not tell."""
    sent = _known_to_others(submission)
    wanted = None if quiet else "Whether lines were refused"
    others = _ask(settings, lambda ledger: ledger.other_content(sent), wanted) if sent else None
    return Refused(submission, others or {})


def _known_to_others(submission: "Submission") -> "dict[UUID, bytes]":
    """The jobs that may have been sent before, with their contents: of millions with fresh ids the table is asked nothing."""
    return {id: line.content_sha for id, line in submission.lines.items() if not line.fresh}


def _ask(
    settings: "Settings", question: "Callable[[Ledger], _Answer]", wanted: str | None = None
) -> _Answer | None:
    """An answer of the job table; None where it cannot be asked: DATABASE_URL may be a producer's own, of anything.

    wanted: what is not known then, to say so where a database is named.
    """
    from headrace.ledger import LedgerError

    try:
        with context.open_ledger(settings) as ledger:
            return question(ledger)
    except Failure:  # none is named
        return None
    except LedgerError as error:
        if wanted and (why := translate(error)):
            note(f"{wanted} is not known. {why.message}")
        return None
