"""The `postroad delegation` commands: what streams have others do, and ending one of it. They need no loop to run."""

from typing import Annotated

import typer

from postroad.model.delegations import DelegationStatus
from postroad.surfaces.dispatch_commands import EXIT_CODES, ActorOption, ReasonOption, actor_of
from postroad.surfaces.options import DatabaseOption, JsonOption, LimitOption, SchemaOption
from postroad.surfaces.output import Conflict, NotFound, reporting, show_json

app = typer.Typer(
    help=f"See what streams have delegated to others, and cancel it. {EXIT_CODES}",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def list_delegations(
    *,
    status: Annotated[DelegationStatus | None, typer.Option("--status", help="In this state.")] = None,
    stream: Annotated[str | None, typer.Option("--stream", help="What this stream wants.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="STREAM", help="What this stream is asked to do.")] = None,
    limit: LimitOption = 50,
    after: Annotated[
        tuple[str, str] | None, typer.Option("--after", metavar="STREAM KEY", help="Behind this one.")
    ] = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List delegations by the streams that want them, and keys."""
    with reporting(as_json):
        from postroad.surfaces import delegation_reading, reading

        found = reading.look(database, schema, delegation_reading.delegations, status, stream, to, after, limit=limit)
        if as_json:
            show_json(found)
        else:
            delegation_reading.show(found, limit=limit)


@app.command("cancel")
def cancel_delegation(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream that wants it.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its name for it.")],
    *,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """End one delegation: the work is withdrawn or stopped, nothing else on its stream is, and a report says so."""
    with reporting(as_json):
        from postroad.surfaces import delegation_reading
        from postroad.surfaces.output import say

        done = delegation_reading.cancelled(database, schema, stream, key, actor=actor_of(actor), reason=reason)
        if not done.status:
            raise NotFound(f"{stream} has delegated nothing under {key!r}.", stream=stream, key=key)
        if not done.done:
            said = f"{key!r} of {stream} is left as it is: {done.refused}"
            raise Conflict(said, stream=stream, key=key, status=done.status, refused={done.refused: 1})
        if as_json:
            show_json({"stream": stream, "key": key, "status": done.status})
        else:
            say(f"{key!r} of {stream} is cancelled")
