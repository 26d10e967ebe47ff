"""`headrace submit`, `status`, `results`, `cancel`: what a user does with prompts."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import context
from headrace.cli.earlier import Refused, refuse_cancelled, refuse_used, refused, refused_so_far
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.follow import follow
from headrace.cli.input import open_input
from headrace.cli.output import Json, count, emit, fields, note, open_output
from headrace.cli.paused import paused
from headrace.cli.promise import Promise
from headrace.cli.results import Format, Lines, Reader, write_result, write_results
from headrace.cli.stopping import interrupt_on_signals, stop_on_signals
from headrace.cli.submission import about_batch, as_json, check_sent, parse_deadline, report_problems, send
from headrace.cli.waiting import Waiting

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from headrace.client import Submission
    from headrace.ledger import BatchProgress, JobStatus, Ledger
    from headrace.settings import Settings

PANEL = "Prompts"

Input = Annotated[str, typer.Argument(metavar="FILE|-", help="JSON lines: jobs, or OpenAI's batch format.")]
Tenant = Annotated[
    str | None, typer.Option(help="On whose behalf; default: HEADRACE_TENANT.", show_default=False)
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stay until the batch is complete.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (submit, status, results, cancel):
        app.command(rich_help_panel=PANEL)(command)


def submit(
    file: Input,
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

    One that is compressed, UTF-16 or UTF-32, a JSON array, JSON over several lines or text is refused, with a command that makes
    lines of it.

    A bad line is sent as well: it ends as failed or rejected in its batch, and does not touch its neighbours. One that
    cannot be sent (too large for a Kafka message, or of another batch or tenant) is left out: the others run, and the
    command names it and ends with 2. A second line with the job_id and the content of another is the same job, and is not sent
    either; lines that share no more than a custom_id all run, and are warned of. A line that cannot be read has "line 7" for its
    custom_id in the results, on the dead-letter topic and in the job table. A field that no job has, misspelt maybe, is ignored
    and named, with the one most like it. --json names all problems.

    A submit that was broken off says how many jobs were sent. With --idempotency-key the same command goes on from there;
    without one it would run them twice, so a --batch that has jobs is refused, and so is one that was cancelled. Under a key
    a line that was changed does not run, nor does one that another --batch has: as far as the job table tells, which with
    --follow is all, the command names them and ends with 6.
    """
    settings = context.load_settings(tenant=tenant)
    refuse_cancelled(settings, batch, idempotency_key)
    if batch is not None and idempotency_key is None:
        refuse_used(settings, batch)
    expires_at = None if deadline is None else parse_deadline(deadline)
    with interrupt_on_signals(), open_input(file, "headrace submit -") as lines:
        submission = send(
            settings,
            lines,
            tier,
            batch_id=batch,
            deadline=expires_at,
            idempotency_key=idempotency_key,
            strict=strict,
        )
        if not json:
            note(f"Batch {submission.batch_id}: {count(submission.expected, 'job')} sent to tier {tier}.")
            if expires_at is not None and expires_at <= datetime.now(UTC):
                note("The --deadline has passed: what has none of its own ends as expired.")
    if not json:
        report_problems(submission)
    progress, interrupted, changed = None, False, Refused(submission, {})
    try:
        if wait:
            with context.open_ledger(settings) as ledger, stop_on_signals() as stop:
                progress = follow(
                    ledger,
                    settings.tenant,
                    submission.batch_id,
                    stop,
                    promise=_promise_of(settings, submission),
                    quiet=json,
                )
                waiting = Waiting(stop, answered=True)
                told = None if stop.is_set() else waiting.ask(lambda: refused(ledger, submission))
                interrupted = told is None
                changed = told or changed
        else:
            changed = refused_so_far(settings, submission, quiet=json)
    finally:
        if json:  # also where that fails: the batch's name alone leads to what was sent
            followed = {"batch": progress, "interrupted": interrupted} if wait else {}
            emit(as_json(submission, tier, changed.lines) | followed)
    if progress and not json:
        show_batch(progress)
    elif not json:
        note(about_batch(settings, "status", submission.batch_id))
        note(about_batch(settings, "results", submission.batch_id, "--follow"))
    if interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    changed.check()
    check_sent(submission)


def status(
    target: Annotated[str, typer.Argument(metavar="BATCH|JOB", help="A batch, or a job's id or job_id.")],
    tenant: Tenant = None,
    wait: Follow = False,
    json: Json = False,
) -> None:
    """Show how far a batch is, or where a job stands.

    `running` are jobs that an engine has been given, those that wait inside it for their turn included. Where jobs wait since
    the worker behind HEADRACE_HEALTH_PORT of this machine takes none for now, it says why.
    """
    settings = context.load_settings(tenant=tenant)
    with context.open_ledger(settings) as ledger:
        found = find(ledger, settings.tenant, target)
        interrupted = False
        if wait and _is_batch(found):
            with stop_on_signals() as stop:
                promise = _promise_to_others(settings, target)
                found = follow(ledger, settings.tenant, target, stop, promise=promise, quiet=json) or found
                interrupted = stop.is_set()
    if json:
        emit(asdict(found) | ({"interrupted": interrupted} if wait else {}))
    elif _is_batch(found):
        show_batch(found)
        if found.queued and (why := paused(settings)):
            note(f"Jobs wait: {why}.")
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
    run: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of a batch: results of this run of its jobs alone, whatever came after it."
        ),
    ] = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Print results as JSON lines, one for each job of a batch that has ended or was rejected.

    A job that was run again has its last run's result here, and none while that runs: --run 1 prints the former ones.
    With --follow they come as the jobs end, in the order in which they do; Ctrl-C leaves those that have come, and says how
    many. --json prints a summary to stdout, and so needs --output. Results too large for a message are read from
    HEADRACE_RESULT_STORE; where one cannot be read its line says where it is, and the command ends with 3.
    """
    if json and output in (None, "-"):
        raise Failure(
            Exit.USAGE, "--json prints a summary to stdout, where the results go.", "Add --output FILE."
        )
    if run is not None and wait:
        raise Failure(
            Exit.USAGE,
            "--run prints what there is of a run; --follow waits for the last one.",
            "Leave one out.",
        )
    settings = context.load_settings(tenant=tenant)
    reader = Reader(context.result_store(settings))
    with context.open_ledger(settings) as ledger, stop_on_signals() as stop:
        found = find(ledger, settings.tenant, target)
        if run is not None:  # before an output is made, or overwritten, for nothing
            if not _is_batch(found):
                raise Failure(Exit.USAGE, f"{target} is a job, and --run is for batches.", "Leave it out.")
            if not ledger.has_run(settings.tenant, target, run):
                raise Failure(
                    Exit.NOT_FOUND, f"No job of batch {target} has a run {run}.", "Try a lower --run."
                )
        with open_output(output) as out:
            lines = Lines(out, format, reader)
            if _is_batch(found):
                promise = _promise_to_others(settings, target) if wait else None
                written = write_results(
                    ledger, settings.tenant, target, lines, promise=promise, stop=stop, run=run
                )
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
    elif stop.is_set():
        note(f"Stopped after {count(written, 'result')}.")
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
        note(
            f"Asked to cancel {kind} {target}; `{about_batch(settings, 'status', target)}` shows what came of it."
        )


def find(ledger: "Ledger", tenant: str, target: str, remedy: str = "") -> "BatchProgress | JobStatus":
    """The batch or, failing that, the job that ``target`` names. Raises Failure."""
    from headrace.schemas.ids import key_meant

    found = ledger.batch(tenant, target) or ledger.job(key_meant(tenant, target))
    if found is None:
        raise Failure(
            Exit.NOT_FOUND,
            f"Nothing is known of a batch or job {target!r} of tenant {tenant!r}.",
            remedy
            or "A job goes by its id or job_id, not by its custom_id. What was just sent the recorder may not have read yet: is"
            " `headrace recorder` running?",
        )
    return found


def _promise_of(settings: "Settings", submission: "Submission") -> Promise:
    """What was just sent; under an idempotency key the job table may still show an earlier sending as complete."""
    if submission.sending is None:
        return Promise(submission.expected)
    return Promise(
        submission.expected, submission.sending, lambda: context.announced(settings, submission.batch_id)
    )


def _promise_to_others(settings: "Settings", batch_id: str) -> Promise:
    """What somebody else's batch is to have: the job table says, and Kafka what the recorder has not read."""
    return Promise(unread=lambda: context.announced(settings, batch_id))


def _is_batch(found: "BatchProgress | JobStatus") -> "TypeIs[BatchProgress]":
    from headrace.ledger import BatchProgress

    return isinstance(found, BatchProgress)


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
            "running": f"{batch.running} (in an engine, or waiting inside it)" if batch.running else 0,
            "queued": batch.queued,
            "tokens": f"{batch.prompt_tokens} prompt ({batch.cached_tokens} cached), {batch.completion_tokens} completion",
            "opened": batch.opened_at,
            "closed": batch.closed_at,
        }
    )
