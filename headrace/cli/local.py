"""`headrace local`: the whole stack on this machine, and prompts through it."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import context, showcase
from headrace.cli.engine import default_model
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.follow import follow
from headrace.cli.input import check_input, open_input
from headrace.cli.jobs import Input, show_batch
from headrace.cli.output import Json, count, emit, fields, messages, must_be_file, note, open_output
from headrace.cli.promise import Promise
from headrace.cli.results import Format, Lines, Reader, write_results
from headrace.cli.stopping import Stop, interrupt_on_signals, stop_on_signals
from headrace.cli.submission import about_batch, check_sent, must_be_tier, report_problems, send
from headrace.cli.worker_settings import check_worker_settings

if TYPE_CHECKING:
    from headrace.local.stack import Stack
    from headrace.local.state import Addresses
    from headrace.settings import Settings

PANEL = "Set up"
DOWN_S = 120.0
EXAMPLE = Path("examples/prompts.jsonl")

group = typer.Typer(no_args_is_help=True, help="The whole stack on this machine, without Docker.")


def register(app: typer.Typer) -> None:
    """Add this module's group."""
    app.add_typer(group, name="local", rich_help_panel=PANEL)


@group.command()
def up(json: Json = False) -> None:
    """Start broker, database, recorder and a CPU worker, print their addresses, and stay until Ctrl-C.

    Other headrace commands find the stack by themselves. What it holds lives as long as it does; the logs stay.
    KAFKA_BOOTSTRAP_SERVERS and DATABASE_URL win over the embedded parts.
    """
    settings = context.load_settings()
    with stop_on_signals() as stop, _stack(settings, stop, quiet=json) as (stack, addresses):
        if json:
            emit(
                {
                    "kafka_bootstrap_servers": addresses.kafka_bootstrap_servers,
                    "database_url": addresses.database_url,
                }
            )
        else:
            fields(
                {
                    "KAFKA_BOOTSTRAP_SERVERS": addresses.kafka_bootstrap_servers,
                    "DATABASE_URL": addresses.database_url,
                    "logs": stack.state.logs,
                }
            )
            note("Try `headrace submit examples/prompts.jsonl` in another terminal. Ctrl-C stops everything.")
        while not stop.wait(0.5):
            stack.supervise()


@group.command()
def down(json: Json = False) -> None:
    """Stop the stack that runs here, or what a killed one left behind."""
    from headrace.local.state import StateDir

    state = StateDir(context.load_settings().state_dir.absolute())
    parent = state.read().parent
    running = parent is not None and parent.send_signal(signal.SIGTERM)
    if parent is not None and not parent.wait_gone(DOWN_S):
        raise Failure(Exit.UNAVAILABLE, f"Process {parent.pid} does not stop.", f"Its logs: {state.logs}")
    with state.lock():
        left = state.clean_up()
    if json:
        emit({"stopped": running, "cleaned_up": left})
    elif running or left:
        note("Stopped.")
    else:
        note("Nothing runs here.")


@group.command()
def run(
    file: Input,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where results go; default: FILE.BATCH.results.jsonl here.",
            show_default=False,
        ),
    ] = None,
    tier: Annotated[str, typer.Option(help="How urgent: one of HEADRACE_TIERS.")] = "standard",
    format: Annotated[
        Format, typer.Option(help="JobResult lines, or lines of OpenAI's batch output.")
    ] = Format.JSONL,
    json: Json = False,
) -> None:
    """Run a file of prompts through the stack: through the one that is up, or one started for it and then stopped.

    The latter is for this file alone: another one has to wait, or to have another HEADRACE_STATE_DIR. Ctrl-C leaves the
    results that have come, and says what becomes of the rest.
    """
    settings = context.load_settings()
    outlives = settings.kafka_bootstrap_servers is not None  # what is sent, a stack that is started here
    # All that can be known before a stack is started for nothing.
    must_be_tier(settings, tier)
    if output is not None:
        must_be_file(output)
        _must_not_be(file, output)
    with (
        open_input(file, "headrace local run -") as prompts,
        stop_on_signals() as stop,
        _running(settings, stop, quiet=json) as (settings, stack),
    ):
        with interrupt_on_signals():
            submission = send(settings, prompts, tier)
        # Two runs of a file, at once or one after the other, keep their results apart.
        stem = "stdin" if file == "-" else Path(file).stem
        target = output or Path(f"{stem}.{submission.batch_id}.results.jsonl")
        if not json:
            report_problems(submission)
        with context.open_ledger(settings) as ledger:
            supervise = stack.supervise if stack else lambda: None
            batch = follow(
                ledger, settings.tenant, submission.batch_id, stop,
                promise=Promise(submission.expected), quiet=json, meanwhile=supervise,
            )  # fmt: skip
            reader = Reader(context.result_store(settings))
            with open_output(str(target)) as out:
                lines = Lines(out, format, reader)
                written = write_results(
                    ledger, settings.tenant, submission.batch_id, lines, promise=None, stop=Stop()
                )
    if json:
        emit({"batch": batch, "written": written, "output": str(target), "interrupted": stop.is_set()})
    else:
        if batch:
            show_batch(batch)
        note(f"{count(written, 'result')} in {target}.")
        if stop.is_set() and not (batch and batch.over):
            note(_what_becomes_of(settings, submission.batch_id, target, format, stack, outlives))
    if stop.is_set():
        raise typer.Exit(Exit.INTERRUPTED)
    reader.check()
    check_sent(submission)


@group.command()
def demo(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="JSON lines: jobs, or OpenAI's batch format.")
    ] = EXAMPLE,
) -> None:
    """Start a stack, run example prompts, show answers and the job table, and stop everything."""
    check_input(file)
    settings = context.load_settings()
    embedded = not settings.kafka_bootstrap_servers and not settings.database_url
    with stop_on_signals() as stop, _stack(settings, stop, passing=True) as (stack, addresses):
        settings = _at(settings, addresses)
        # A table that outlives the demo may hold the last one's batch.
        with file.open("rb") as lines:
            submission = send(settings, lines, "standard", batch_id="demo" if embedded else None)
        batch_id = submission.batch_id
        on_purpose = ", on purpose" if file == EXAMPLE else ""
        problems = f"; these will not succeed{on_purpose}:" if submission.problems else "."
        note(f"{submission.expected} prompts of {file} are on their way{problems}")
        report_problems(submission)
        with context.open_ledger(settings) as ledger:
            batch = follow(
                ledger, settings.tenant, batch_id, stop,
                promise=Promise(submission.expected), meanwhile=stack.supervise,
            )  # fmt: skip
            if batch is not None and batch.complete:
                showcase.answers(ledger, settings.tenant, batch_id, file)
                showcase.table_rows(addresses.database_url, batch_id)
        note("Stopping everything.")
    if stop.is_set():
        raise typer.Exit(Exit.INTERRUPTED)


@group.command()
def model(json: Json = False) -> None:
    """Make sure that the default model is on this machine, and print its directory."""
    directory = default_model()
    if json:
        emit({"directory": directory})
    else:
        print(directory)


@contextmanager
def _stack(
    settings: "Settings", stop: Stop, quiet: bool = False, passing: bool = False
) -> "Iterator[tuple[Stack, Addresses]]":
    """A stack that is up; stopped at the end, however it comes. Raises before it starts where its worker never could."""
    from headrace.local.stack import Stack

    check_worker_settings(settings)
    with Stack(settings, stop, (lambda text: None) if quiet else _report, passing=passing) as stack:
        yield stack, stack.start()


@contextmanager
def _running(settings: "Settings", stop: Stop, quiet: bool) -> "Iterator[tuple[Settings, Stack | None]]":
    """Settings that point to a stack: the one that is up already and stays, else one of our own."""
    from headrace.local.state import StateDir

    if addresses := StateDir(settings.state_dir.absolute()).staying():
        yield _at(settings, addresses), None
    else:
        with _stack(settings, stop, quiet, passing=True) as (stack, addresses):
            yield _at(settings, addresses), stack


def _what_becomes_of(
    settings: "Settings", batch_id: str, target: Path, format: Format, stack: "Stack | None", outlives: bool
) -> str:
    """Of a batch that is followed no more, and how to go on with it or to end it.

    stack: the one that was started for it, and is stopped now. outlives: whether its jobs lie in a Kafka that is not.
    """
    cancel = about_batch(settings, "cancel", batch_id, "--batch")
    if stack is None:
        output = ("--follow", "--format", format.value, "--output", str(target))
        go_on = about_batch(settings, "results", batch_id, *output)
        return f"Batch {batch_id} runs on: `{go_on}` goes on with it, `{cancel}` ends it."
    if outlives:
        return (
            f"What has not ended of batch {batch_id} waits in Kafka for a worker (`headrace local up` starts one);"
            f" `{cancel}` ends it."
        )
    return f"What has not ended of batch {batch_id} is gone with its stack: run the file again."


def _must_not_be(file: str, output: Path) -> None:
    """Raise Failure where results would be written over the prompts, whatever the two are called."""
    if file == "-" and sys.stdin is None:  # closed, which is told when it is opened
        return
    if not output.is_file():  # a terminal may well be both
        return
    prompts = os.fstat(0) if file == "-" else os.stat(file)
    if os.path.samestat(prompts, output.stat()):
        raise Failure(
            Exit.REFUSED, f"{output} is already there: it is the file of the prompts.", "Choose another."
        )


def _at(settings: "Settings", addresses: "Addresses") -> "Settings":
    return settings.model_copy(
        update={
            "kafka_bootstrap_servers": addresses.kafka_bootstrap_servers,
            "database_url": addresses.database_url,
        }
    )


def _report(text: str) -> None:
    messages().print(f"[green]·[/green] {text}")
