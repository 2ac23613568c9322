"""The `postroad gate` commands: what is down, and opening it by hand. They need no loop to run."""

from typing import Annotated

import typer

from postroad.surfaces.dispatch_commands import EXIT_CODES, ActorOption, ReasonOption, actor_of
from postroad.surfaces.options import DatabaseOption, JsonOption, SchemaOption
from postroad.surfaces.output import NotFound, reporting, show_json

app = typer.Typer(
    help=f"See which kinds and hosts are down, and open their gates. {EXIT_CODES}",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def list_gates(*, database: DatabaseOption = None, schema: SchemaOption = None, as_json: JsonOption = False) -> None:
    """List the closed gates, the one that has been closed longest first."""
    with reporting(as_json):
        from postroad.surfaces import gate_reading, reading, screens

        found = reading.look(database, schema, gate_reading.gates)
        if as_json:
            show_json(found)
        else:
            screens.gates(found)


@app.command("open")
def open_gate(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="The kind.")],
    host: Annotated[str, typer.Argument(metavar="[HOST]", help="One host of it; else the kind as a whole.")] = "",
    *,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let sends go at once; the first that finds its destination down closes the gate again."""
    with reporting(as_json):
        from postroad.surfaces import gate_reading
        from postroad.surfaces.output import say

        who, host = actor_of(actor), host.lower()  # as hosts are kept
        if not gate_reading.opened(database, schema, kind, host, actor=who, reason=reason):
            raise NotFound(f"The gate of {gate_reading.named(kind, host)} is not closed.", kind=kind, host=host)
        if as_json:
            show_json({"kind": kind, "host": host, "opened": True})
        else:
            say(f"The gate of {gate_reading.named(kind, host)} is open.")
