"""The root of the command line: its groups, the boundary where errors are translated, and the version."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from headrace.cli import dlq, doctor, files, jobs, ledger, local, retry, serve, topics
from headrace.cli.errors import DISK_FULL, Failure, defect, translate
from headrace.cli.exits import Exit
from headrace.cli.output import discard, show_failure


class Boundary(TyperGroup):
    """The group at the root. Nothing that a user can cause leaves it as a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember whether a failure has to be JSON, whichever part of the command line is at fault."""
        ctx.obj = {"json": True} if "--json" in args else None
        with _usage_errors(as_json=bool(ctx.obj)):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a translated error is shown and becomes its exit code."""
        try:
            with _usage_errors(as_json=bool(ctx.obj)):
                returned = super().invoke(ctx)
            sys.stdout.flush()  # here, where it may fail
            return returned
        except BrokenPipeError:  # `headrace results b | head` has read enough
            discard(sys.stdout, sys.stderr)
            raise typer.Exit(Exit.PIPE_CLOSED) from None
        except (typer.Exit, typer.Abort, TyperException):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                discard(sys.stdout)
            failure = translate(error) or (defect(error) if ctx.obj else None)
            if failure is None:
                raise
            show_failure(failure, as_json=bool(ctx.obj))
            raise typer.Exit(failure.exit_code) from None


@contextmanager
def _usage_errors(as_json: bool) -> Iterator[None]:
    """Around what reads the command line: with --json its errors are JSON too; else Typer draws them."""
    try:
        yield
    except TyperException as error:
        if not as_json:
            raise
        message = getattr(error, "format_message", error.__str__)()
        show_failure(Failure(Exit.USAGE, message, "See --help."), as_json=True)
        raise typer.Exit(Exit.USAGE) from None


def _version(value: bool) -> None:
    if value:
        from headrace import __version__

        print(f"headrace {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Boundary,
    name="headrace",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals hold prompts
    rich_markup_mode="markdown",  # joins the lines of a paragraph, whatever the terminal's width
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: "
    + "; ".join(f"{int(code)} {code.name.lower().replace('_', ' ')}" for code in Exit)
    + ".",
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Queue-driven batch inference: prompts in on Kafka, answers out on Kafka and in Postgres."""


for module in (jobs, retry, dlq, serve, ledger, topics, files, doctor, local):
    module.register(app)
