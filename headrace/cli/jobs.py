"""`headrace submit`, `status`, `results`, `cancel`: what a user does with prompts."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import context
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.follow import Promise, follow
from headrace.cli.output import Json, count, emit, fields, note, open_input, open_output
from headrace.cli.results import Format, Lines, Reader, write_result, write_results
from headrace.cli.stopping import interrupt_on_signals, stop_on_signals

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from headrace.client import Submission
    from headrace.ledger import BatchProgress, JobStatus, Ledger
    from headrace.settings import Settings

PANEL = "Prompts"
SHOWN_PROBLEMS = 5
SHOWN_LINES = 20

Tenant = Annotated[
    str | None, typer.Option(help="On whose behalf; default: HEADRACE_TENANT.", show_default=False)
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stay until the batch is complete.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (submit, status, results, cancel):
        app.command(rich_help_panel=PANEL)(command)


def submit(
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="JSON lines: jobs, or OpenAI's batch format.")
    ],
    tier: Annotated[str, typer.Option(help="How urgent: one of HEADRACE_TIERS.")] = "standard",
    batch: Annotated[
        str | None, typer.Option(help="Name of the batch; made up if left out.", show_default=False)
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="For jobs without one: 90s, 30m, 2h, 1d, or 2027-01-31T12:00:00Z.", show_default=False
        ),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="Submitting again under the same key runs nothing twice.", show_default=False),
    ] = None,
    tenant: Tenant = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first line that is not a valid job.")
    ] = False,
    wait: Follow = False,
    json: Json = False,
) -> None:
    """Send a file of prompts to Kafka as one batch.

    A bad line is sent as well: it ends as failed or rejected in its batch, and does not touch its neighbours. One that
    cannot be sent (too large for a Kafka message, or of another batch or tenant) is left out: the others run, and the
    command names it and ends with 2. A second copy of a job of the file is the same job, and is not sent either.

    A submit that was broken off says how many jobs were sent. With --idempotency-key the same command goes on from there;
    without one it would run them twice, so a --batch that has jobs is refused.
    """
    settings = context.load_settings(tenant=tenant)
    if batch is not None and idempotency_key is None:
        refuse_used(settings, batch)
    with interrupt_on_signals():
        submission = send(
            settings,
            file,
            tier,
            batch_id=batch,
            deadline=None if deadline is None else parse_deadline(deadline),
            idempotency_key=idempotency_key,
            strict=strict,
        )
    if not json:
        note(f"Batch {submission.batch_id}: {count(submission.expected, 'job')} sent to tier {tier}.")
        report_problems(submission)
    progress, interrupted = None, False
    if wait:
        with context.open_ledger(settings) as ledger, stop_on_signals() as stop:
            progress = follow(
                ledger,
                settings.tenant,
                submission.batch_id,
                stop,
                promise=Promise(submission.expected),
                quiet=json,
            )
            interrupted = stop.is_set()
    if json:
        more = {"batch": progress, "interrupted": interrupted} if wait else {}
        emit(_submitted(submission, tier) | more)
    elif progress:
        show_batch(progress)
    else:
        note(f"headrace status {submission.batch_id}\nheadrace results {submission.batch_id} --follow")
    if interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    check_sent(submission)


def status(
    target: Annotated[str, typer.Argument(metavar="BATCH|JOB", help="A batch, or a job's id or job_id.")],
    tenant: Tenant = None,
    wait: Follow = False,
    json: Json = False,
) -> None:
    """Show how far a batch is, or where a job stands."""
    settings = context.load_settings(tenant=tenant)
    with context.open_ledger(settings) as ledger:
        found = find(ledger, settings.tenant, target)
        interrupted = False
        if wait and _is_batch(found):
            with stop_on_signals() as stop:
                promise = _promise(settings, target)
                found = follow(ledger, settings.tenant, target, stop, promise=promise, quiet=json) or found
                interrupted = stop.is_set()
    if json:
        emit(asdict(found) | ({"interrupted": interrupted} if wait else {}))
    elif _is_batch(found):
        show_batch(found)
    else:
        fields(asdict(found))
    if interrupted:
        raise typer.Exit(Exit.INTERRUPTED)


def results(
    target: Annotated[str, typer.Argument(metavar="BATCH|JOB", help="A batch, or a job's id or job_id.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.", show_default=False),
    ] = None,
    format: Annotated[
        Format, typer.Option(help="JobResult lines, or lines of OpenAI's batch output.")
    ] = Format.JSONL,
    wait: Follow = False,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Print results as JSON lines, one for each job of a batch that has ended or was rejected.

    With --follow they come as the jobs end, in the order in which they do. --json prints a summary to stdout, and so
    needs --output. Results too large for a message are read from HEADRACE_RESULT_STORE; where one cannot be read its line
    says where it is, and the command ends with 3.
    """
    if json and output in (None, "-"):
        raise Failure(
            Exit.USAGE, "--json prints a summary to stdout, where the results go.", "Add --output FILE."
        )
    settings = context.load_settings(tenant=tenant)
    reader = Reader(context.result_store(settings))
    with context.open_ledger(settings) as ledger, stop_on_signals() as stop:
        found = find(ledger, settings.tenant, target)
        with open_output(output) as out:
            lines = Lines(out, format, reader)
            if _is_batch(found):
                promise = _promise(settings, target) if wait else None
                written = write_results(ledger, settings.tenant, target, lines, promise=promise, stop=stop)
            else:
                written = write_result(ledger, found.id, lines, follow=wait, stop=stop)
    if json:
        emit(
            {
                "target": target,
                "written": written,
                "not_read": len(reader.unread),
                "output": output,
                "interrupted": stop.is_set(),
            }
        )
    elif output not in (None, "-"):
        note(f"{count(written, 'result')} in {output}.")
    if stop.is_set():
        raise typer.Exit(Exit.INTERRUPTED)
    reader.check()


def cancel(
    target: Annotated[str, typer.Argument(metavar="BATCH|JOB", help="A batch, or a job's id or job_id.")],
    as_batch: Annotated[
        bool, typer.Option("--batch", help="It is a batch, even if nothing is known of it yet.")
    ] = False,
    as_job: Annotated[
        bool, typer.Option("--job", help="It is a job, even if nothing is known of it yet.")
    ] = False,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Cancel a batch or a job: what has not ended ends as cancelled. What has ended keeps its result."""
    if as_batch and as_job:
        raise Failure(Exit.USAGE, "It is either a --batch or a --job.", "Leave one of the two out.")
    settings = context.load_settings(tenant=tenant)
    if not as_batch and not as_job:
        with context.open_ledger(settings) as ledger:
            as_job = not _is_batch(
                find(ledger, settings.tenant, target, "--batch or --job cancels it unseen.")
            )
    with context.open_client(settings) as client:
        client.cancel_job(target) if as_job else client.cancel_batch(target)
    kind = "job" if as_job else "batch"
    if json:
        emit({"cancelled": target, "kind": kind})
    else:
        note(f"Asked to cancel {kind} {target}; `headrace status {target}` shows what came of it.")


def send(
    settings: "Settings",
    file: str,
    tier: str,
    *,
    batch_id: str | None = None,
    idempotency_key: str | None = None,
    **options: Any,
) -> "Submission":
    """Submit ``file``, "-" for stdin. Raises Failure for a file or a tier that does not exist, and on Ctrl-C."""
    if tier not in settings.tiers:
        raise Failure(Exit.USAGE, f"There is no tier {tier!r}.", f"Tiers are {', '.join(settings.tiers)}.")
    with open_input(file) as lines, context.open_client(settings) as client:
        try:
            return client.submit(lines, tier, batch_id=batch_id, idempotency_key=idempotency_key, **options)
        except KeyboardInterrupt:
            message = f"Stopped when Kafka had confirmed {count(client.confirmed, 'job')}."
            raise Failure(Exit.INTERRUPTED, message, _how_to_go_on(batch_id, idempotency_key)) from None


def _how_to_go_on(batch_id: str | None, idempotency_key: str | None) -> str:
    """With a submit that was broken off; see Client.submit for what becomes of its batch."""
    if idempotency_key is not None:
        return "Give the same command with the same --idempotency-key to go on: nothing runs twice."
    if batch_id is None:
        return "What was sent is cancelled: submit the file again."
    return (
        f"What was sent runs, and batch {batch_id!r} stays open. To begin again end it with `headrace cancel {batch_id} --batch`"
        " and choose another --batch; a submit with --idempotency-key could be repeated as it is."
    )


def refuse_used(settings: "Settings", batch_id: str) -> None:
    """Raise Failure if the job table says that the batch is closed or has jobs.

    The count of a closed one is final. One that is open and has jobs is what a submit that was broken off leaves behind:
    without an idempotency key a line has another id each time, and would run twice.

    Submitting needs no job table, so where none is named or it does not answer nothing is refused.
    """
    from headrace.ledger import LedgerUnavailable, NotMigrated

    try:
        with context.open_ledger(settings) as ledger:
            batch = ledger.batch(settings.tenant, batch_id)
    except (LedgerUnavailable, NotMigrated):
        return
    except Failure as failure:
        if failure.exit_code is not Exit.NOT_READY:
            raise
        return
    if batch is None:
        return
    if batch.closed_at is not None:
        raise Failure(
            Exit.REFUSED,
            f"Batch {batch_id!r} was closed with {batch.expected} records; what comes later would not be waited for.",
            "Choose another --batch; to go on with a submit that broke off, give its --idempotency-key again.",
        )
    if held := batch.submitted + batch.rejected:
        raise Failure(
            Exit.REFUSED,
            f"Batch {batch_id!r} is open and has {count(held, 'record')} already: sent again, lines would run twice.",
            "To go on with a submit that broke off, give its --idempotency-key again. If it had none, choose another --batch,"
            f" and end what runs with `headrace cancel {batch_id} --batch`.",
        )


def report_problems(submission: "Submission") -> None:
    """Say which lines will not succeed, those that were left out first."""
    for problem in sorted(submission.problems, key=lambda problem: not problem.left_out)[:SHOWN_PROBLEMS]:
        note(str(problem) + ("" if problem.sent else " (not sent)"))
    more = len(submission.problems) - SHOWN_PROBLEMS
    if more > 0:
        note(f"... and {more} more such lines.")


def check_sent(submission: "Submission") -> None:
    """Raise Failure if lines were left out of the batch: its results say nothing of them."""
    left_out = [problem for problem in submission.problems if problem.left_out]
    if left_out:
        numbers = ", ".join(str(problem.line) for problem in left_out[:SHOWN_LINES])
        more = f" and {len(left_out) - SHOWN_LINES} more" if len(left_out) > SHOWN_LINES else ""
        raise Failure(
            Exit.USAGE,
            f"{count(len(left_out), 'line')} could not be sent (line {numbers}{more}), the first because {left_out[0].message}.",
            "The others run. Mend these, and submit them as a batch of their own.",
        )


def find(ledger: "Ledger", tenant: str, target: str, remedy: str = "") -> "BatchProgress | JobStatus":
    """The batch or, failing that, the job that ``target`` names. Raises Failure."""
    from headrace.schemas.ids import key_meant

    found = ledger.batch(tenant, target) or ledger.job(key_meant(tenant, target))
    if found is None:
        raise Failure(
            Exit.NOT_FOUND,
            f"Nothing is known of a batch or job {target!r} of tenant {tenant!r}.",
            remedy or "The recorder may not have read it yet; is `headrace recorder` running?",
        )
    return found


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


def _promise(settings: "Settings", batch_id: str) -> Promise:
    """What somebody else's batch is to have: the job table says, and Kafka what the recorder has not read."""
    return Promise(announced=lambda: context.announced(settings, batch_id))


def _is_batch(found: "BatchProgress | JobStatus") -> "TypeIs[BatchProgress]":
    from headrace.ledger import BatchProgress

    return isinstance(found, BatchProgress)


def _submitted(submission: "Submission", tier: str) -> dict[str, Any]:
    return {
        "tenant": submission.tenant,
        "batch_id": submission.batch_id,
        "tier": tier,
        "expected": submission.expected,
        "not_sent": sum(problem.left_out for problem in submission.problems),
        "problems": [asdict(problem) for problem in submission.problems],
    }


def show_batch(batch: "BatchProgress") -> None:
    """Counts, tokens and times of a batch."""
    total = "?" if batch.total is None else batch.total
    fields(
        {
            "batch": f"{batch.batch_id} (tenant {batch.tenant})",
            "state": f"{batch.state}, {batch.done} of {total} ended",
            "succeeded": batch.succeeded,
            "failed": batch.failed,
            "cancelled": batch.cancelled or None,
            "expired": batch.expired or None,
            "rejected": batch.rejected or None,
            "running": batch.running,
            "queued": batch.queued,
            "tokens": f"{batch.prompt_tokens} prompt ({batch.cached_tokens} cached), {batch.completion_tokens} completion",
            "opened": batch.opened_at,
            "closed": batch.closed_at,
        }
    )
