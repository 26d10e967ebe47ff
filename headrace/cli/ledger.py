"""`headrace migrate`: bring the database's tables up to date."""

from typing import Annotated

import typer

from headrace.cli import context
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.output import Json, emit, note

PANEL = "Set up"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(rich_help_panel=PANEL)(migrate)


def migrate(
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Change nothing; exit 5 if something is missing, 4 if Postgres is away."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Create or update the job table in Postgres. Safe to run again, and from several places at once."""
    from headrace import ledger

    url = context.database_url(context.load_settings())
    if check:
        if problems := ledger.check(url):
            raise Failure(Exit.NOT_READY, " ".join(problems))
    else:
        ledger.migrate(url)
    if json:
        emit({"migrated": True})
    else:
        note("The database is up to date.")
