"""The `postroad stream` commands. They need no loop to run.

Exit codes: 0 done, 1 no such stream, or the database is away, 2 wrong use.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from postroad.surfaces.dispatch_commands import ActorOption, ReasonOption, actor_of
from postroad.surfaces.options import DatabaseOption, JsonOption, LimitOption, SchemaOption
from postroad.surfaces.output import Conflict, WrongUse, reporting, show_json

app = typer.Typer(
    help="Look at streams, and decide on them. Exit codes: 0 done, 1 not found or no database, 2 wrong use.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

How = Literal["retry", "continue", "discard"]
POSITION_MAX = 2**63 - 1
StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name, type/id.")]


class State(StrEnum):
    """What a stream is about."""

    IDLE = "idle"
    WAITING = "waiting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    PARKED = "parked"


@app.command("ls")
def list_streams(
    *,
    stream_type: Annotated[str | None, typer.Option("--type", help="Of this type.")] = None,
    state: Annotated[State | None, typer.Option("--state", help="In this state.")] = None,
    limit: LimitOption = 50,
    after: Annotated[str, typer.Option("--after", metavar="STREAM", help="Whose names come after this one.")] = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List streams by name, and what each is about; deleted ones only if something waits in them."""
    with reporting(as_json):
        from postroad.surfaces import reading, screens, stream_reading

        wanted = stream_reading.wanted(stream_type, None if state is None else state.value, after)
        found = reading.look(database, schema, stream_reading.streams, wanted, limit=limit)
        if as_json:
            show_json(found)
        else:
            screens.streams(found, limit=limit)


@app.command("show")
def show_stream(
    stream: StreamArgument,
    *,
    after: Annotated[int | None, typer.Option("--after", min=0, help="Entries after this place, not the last.")] = None,
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a stream: its entries, waiting and dead events, runs, and who holds it."""
    with reporting(as_json):
        from postroad.surfaces import reading, screens

        found = reading.look(database, schema, reading.stream, stream, after=after, limit=limit)
        if as_json:
            show_json(found)
        else:
            screens.stream(found)


@app.command("events")
def list_events(
    stream: StreamArgument,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="What ended without a decision, newest first.")] = False,
    after: Annotated[
        int | None, typer.Option("--after", min=0, max=2**63 - 1, metavar="CURSOR", help="Behind it.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="At most so many.")] = 50,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what waits in a stream, oldest first, with what it says."""
    with reporting(as_json):
        from postroad.surfaces import reading, stream_reading, stream_screens

        found = reading.look(database, schema, stream_reading.events, stream, dead=dead, after=after, limit=limit)
        if as_json:
            show_json([stream_reading.plain(event) for event in found])
        else:
            stream_screens.events(found, limit=limit)


@app.command("delete")
def delete_stream(
    stream: StreamArgument,
    *,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a stream for good: what waits is dropped, its timers are cancelled, and its name is never used again."""
    with reporting(as_json):
        from postroad.surfaces import stream_reading
        from postroad.surfaces.output import say

        who = actor_of(actor)
        with stream_reading.acting(stream, database, schema) as streams:
            done = streams.delete(stream, actor=who, reason=reason)
        if as_json:
            show_json({"stream": stream, "deleted": True, "done": done})
        else:
            say(f"{stream} {'was deleted' if done else 'had been deleted before'}")


@app.command("stop")
def stop_stream(
    stream: StreamArgument,
    *,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw what people have published and wait for, and end the turn under way; the log says what it did."""
    with reporting(as_json):
        from postroad.surfaces import stream_reading
        from postroad.surfaces.output import say

        who = actor_of(actor)
        with stream_reading.acting(stream, database, schema) as streams:
            streams.stop(stream, actor=who, reason=reason)
        if as_json:
            show_json({"stream": stream, "stopped": True})
        else:
            say(f"{stream} is stopped; its next worker sees to it")


@app.command("resolve")
def resolve_stream(
    stream: StreamArgument,
    *,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run the turn again as if it had called nothing: it may be done twice.")
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Run the turn again with the recorded results of its tools.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="End the turn with an entry on what it did, and move on.")
    ] = False,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a parked stream go; exactly one of --retry, --continue and --discard says how."""
    with reporting(as_json):
        from postroad.surfaces import stream_reading
        from postroad.surfaces.output import say

        asked: list[tuple[How, bool]] = [("retry", retry), ("continue", go_on), ("discard", discard)]
        chosen = [how for how, wanted in asked if wanted]
        if len(chosen) != 1:
            raise WrongUse("Give exactly one of --retry, --continue and --discard.")
        who = actor_of(actor)
        with stream_reading.acting(stream, database, schema) as streams:
            done = streams.resolve(stream, chosen[0], actor=who, reason=reason)
        if not done.done:
            raise Conflict(done.refused, stream=stream, refused={done.refused: 1})
        if as_json:
            show_json({"stream": stream, "how": chosen[0], "calls": done.calls})
        else:
            say(f"{stream} goes on ({chosen[0]}); its turn had called {done.calls} tools")


@app.command("mirror")
def mirror_stream(
    stream: StreamArgument,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the files go; made if it is missing.")],
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a stream's log to files of JSON lines, or what is missing there (provisional)."""
    with reporting(as_json):
        from postroad.surfaces import mirroring
        from postroad.surfaces.output import say

        path, done = mirroring.mirrored(stream, to, database, schema)
        if as_json:
            show_json({"stream": stream, "path": str(path), "lines": done.lines, "aside": done.aside})
        else:
            say(f"{stream}: {done.lines} lines written to {path}, {done.aside} moved aside")
