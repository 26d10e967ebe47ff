"""`headrace generate` and `convert`: files in, files out, with neither Kafka nor Postgres."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import context, logs
from headrace.cli.engine import OnDemand, engine_config, open_engine, served_name
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.follow import duration
from headrace.cli.input import check_input
from headrace.cli.output import Json, emit, must_be_file, note
from headrace.cli.serve import Device, Model
from headrace.cli.stopping import stop_on_signals
from headrace.cli.submission import report_unknown

if TYPE_CHECKING:
    from headrace.engine.generate import Progress
    from headrace.schemas.unknown_fields import UnknownField

PANEL = "Files"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (generate, convert):
        app.command(rich_help_panel=PANEL)(command)


def generate(
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Jobs, or OpenAI's batch format, a line each.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Results, appended as they end.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with OUT.jsonl: run what has no result yet.")
    ] = False,
    model: Model = None,
    device: Device = None,
    in_flight: Annotated[int, typer.Option(min=1, help="Lines in memory at once.")] = 4096,
    json: Json = False,
) -> None:
    """Run a file of prompts through the engine alone, in bounded memory.

    A line ends as a worker's job does, a bad one as failed, and one whose deadline passes before it has ended as expired.
    Ctrl-C leaves a valid file of what has ended; --resume goes on from there. Each result names its line, and the model that
    answered, whichever one the line asked for. Fields that no job has are ignored, and named. --resume reads IN.jsonl again,
    so it is a file, not stdin; one that is compressed, UTF-16 or UTF-32, a JSON array, JSON over several lines or text is
    refused, with a command that makes lines of it.
    """
    check_input(source)
    if str(target) == "-":
        raise Failure(
            Exit.USAGE,
            "Results go to a file, not to stdout: --resume reads them.",
            "Name a file.",
        )
    if not resume and target.exists() and target.stat().st_size:  # known before a model is loaded for nothing
        raise Failure(
            Exit.REFUSED, f"{target} is already there.", "Go on with it by --resume, or choose another."
        )
    must_be_file(target)
    settings = context.load_settings(model=model, device=device)
    logs.configure(settings)

    from headrace.engine import generate as engine_generate
    from headrace.schemas.unknown_fields import UnknownFields
    from headrace.worker import translate

    began = time.monotonic()
    name, unknown = served_name(settings), UnknownFields()
    with stop_on_signals() as stop:
        engine = OnDemand(lambda: open_engine(engine_config(settings), name))
        try:

            def look_at(record: dict[str, Any], number: int) -> None:
                fresh = unknown.note(record, number)
                if not json:
                    report_unknown(fresh)

            def parse(line: bytes, number: int) -> engine_generate.ParsedLine:
                return engine_generate.ParsedLine(*translate.read_line(line, number, look_at))

            def encode(job: Any, completion: Any) -> dict[str, Any]:
                return translate.write_line(job, completion, name)

            progress = engine_generate.generate(
                source,
                target,
                engine,
                parse,
                encode=encode,
                resume=resume,
                max_in_flight=in_flight,
                on_progress=_Reporter(quiet=json),
                stop=stop,
            )
        finally:
            engine.close()
    _summary(progress, unknown.found, time.monotonic() - began, target, json)
    if progress.stopped:
        raise typer.Exit(Exit.INTERRUPTED)


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A .gguf file, or a directory with .bin weights.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make.")],
    json: Json = False,
) -> None:
    """Turn GGUF or pickled weights into a Hugging Face directory with safetensors."""
    if not source.exists():
        raise Failure(Exit.NOT_FOUND, f"There is no {source}.")
    from headrace.engine.convert import convert as convert_model

    made = convert_model(source, target)
    if json:
        emit({"directory": str(made)})
    else:
        note(f"Converted to {made}.")


class _Reporter:
    """A line every few seconds, on stderr."""

    EVERY_S = 5.0

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._began = time.monotonic()
        self._due = self._began + self.EVERY_S

    def __call__(self, progress: "Progress") -> None:
        now = time.monotonic()
        if self._quiet or now < self._due:
            return
        self._due = now + self.EVERY_S
        share = 100 * progress.bytes_read / max(progress.bytes_total, 1)
        rate = progress.completion_tokens / (now - self._began)
        note(
            f"{_done(progress)}, {progress.in_flight} running, "
            f"{share:.0f}% of the file read, {rate:.0f} tokens/s"
        )


def _done(progress: "Progress") -> str:
    expired = f", {progress.expired} expired" if progress.expired else ""
    return f"{progress.succeeded} done, {progress.failed} failed{expired}"


def _summary(
    progress: "Progress", unknown: "list[UnknownField]", seconds: float, target: Path, json: bool
) -> None:
    counts = {
        "succeeded": progress.succeeded,
        "failed": progress.failed,
        "expired": progress.expired,
        "skipped": progress.skipped,
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "completion_tokens": progress.completion_tokens,
    }
    if json:
        emit(
            {
                **counts,
                "unknown_fields": [asdict(field) for field in unknown],
                "seconds": round(seconds, 3),
                "output": str(target),
                "interrupted": progress.stopped,
            }
        )
        return
    note(
        f"{_done(progress)}, {progress.skipped} had a result already; "
        f"{progress.completion_tokens} tokens in {duration(seconds)}, in {target}."
    )
    if progress.stopped:
        note("Stopped; the same command with --resume goes on.")
