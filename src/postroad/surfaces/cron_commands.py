"""The `postroad cron` commands: what is to run when, and how it went. They need no loop and no app."""

from typing import Annotated

import typer

from postroad.surfaces.options import DatabaseOption, JsonOption, SchemaOption
from postroad.surfaces.output import reporting, show_json

app = typer.Typer(help="See the crons that the database knows.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def commands() -> None:
    """See the crons that the database knows."""


@app.command("ls")
def list_crons(
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")] = 200,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List crons by name: their schedules, when they run next, how the last run went."""
    with reporting(as_json):
        from postroad.surfaces import cron_reading, reading

        found = reading.look(database, schema, cron_reading.crons, limit=limit)
        if as_json:
            show_json(found)
        else:
            cron_reading.show(found)
