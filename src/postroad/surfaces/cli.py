"""The command line. What a command needs is imported when it runs, so that `--help` costs next to nothing."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from postroad.surfaces import cron_commands, delegation_commands, dispatch_commands, gate_commands, stream_commands
from postroad.surfaces.options import DatabaseOption, JsonOption, SchemaOption
from postroad.surfaces.output import WrongUse, heard, reporting, say, show_json, show_wrong_use

app = typer.Typer(
    name="postroad",
    help="A durable runtime for agents, and for any program whose decisions act on the world.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(stream_commands.app, name="stream")
app.add_typer(dispatch_commands.app, name="dispatch")
app.add_typer(delegation_commands.app, name="delegation")
app.add_typer(gate_commands.app, name="gate")
app.add_typer(cron_commands.app, name="cron")

BundledOption = Annotated[
    bool, typer.Option("--bundled-sqlite", help="Use the SQLite of the pysqlite3 wheel in this process.")
]
PostgresOption = Annotated[bool, typer.Option("--postgres", help="On an embedded Postgres instead of SQLite.")]


def main() -> None:
    """Run the command that the arguments name."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: whatever is said there is wanted by nobody
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with heard():
        _run()


def _run() -> None:
    if "--json" not in sys.argv[1:]:
        app()
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        said = getattr(error, "format_message", None)  # typer's own errors, whose classes moved between releases
        if said is None:
            raise
        show_wrong_use(said())
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)


def version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        from postroad import __version__

        say(f"postroad {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    bundled_sqlite: BundledOption = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Settle which SQLite this process uses, before anything imports one."""
    use_bundled_sqlite(bundled_sqlite)


def use_bundled_sqlite(wanted: bool) -> None:
    """Put the wheel's SQLite in place if the option or POSTROAD_BUNDLED_SQLITE asks for it."""
    if not wanted and os.environ.get("POSTROAD_BUNDLED_SQLITE", "0") in ("", "0"):
        return
    try:
        import postroad.bundled_sqlite  # noqa: F401
    except ImportError as error:
        from postroad.surfaces.output import FAILED, say_error

        say_error(str(error))
        raise typer.Exit(FAILED) from error


@app.command()
def demo(postgres: PostgresOption = False) -> None:
    """Watch an agent at work while its processes are killed and redeployed."""
    from postroad.demo.main import main as play

    raise typer.Exit(play(postgres=postgres))


@app.command("eval")
def evaluate(
    files: Annotated[list[Path], typer.Argument(help="Scenarios in YAML.", exists=True, dir_okay=False)],
    postgres: PostgresOption = False,
    as_json: JsonOption = False,
) -> None:
    """Play scenarios in virtual time and compare what came of them (provisional)."""
    with reporting(as_json):
        if as_json:
            from postroad.surfaces.evaluating import show

            raise typer.Exit(show(files, postgres=postgres))
        from postroad.demo.evaluate import main as play

        raise typer.Exit(play(files, postgres=postgres))


@app.command()
def run(
    reference: Annotated[str, typer.Argument(metavar="APP", help="module:attribute of a Postroad.")],
    *,
    only: Annotated[str | None, typer.Option("--only", help="Some of turns,sends,timers.")] = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    grace: Annotated[
        float | None, typer.Option("--grace", min=0, help="Seconds to finish what is under way (25).")
    ] = None,
    poll: Annotated[
        float | None, typer.Option("--poll", min=0.001, max=30, help="Seconds between looks (0.25).")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Work until nothing is due, say what was done, and end.")
    ] = False,
    as_json: JsonOption = False,
    bundled_sqlite: BundledOption = False,
) -> None:
    """Run an app's loops until SIGTERM or SIGINT; a second signal ends at once."""
    use_bundled_sqlite(bundled_sqlite)
    from postroad.surfaces import running

    with reporting(as_json):
        if as_json and not once:
            raise WrongUse("--json goes with --once.")
        if once:
            running.run_once(reference, only=only, database=database, schema=schema, as_json=as_json)
            return
        running.run(reference, only=only, database=database, schema=schema, grace=grace, poll=poll)


class Migration(StrEnum):
    """What `migrate` does."""

    APPLY = "apply"
    STATUS = "status"
    VERIFY = "verify"


@app.command()
def migrate(
    action: Annotated[Migration, typer.Argument(help="What to do.")] = Migration.APPLY,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the database's schema up to date, list its steps, or see whether it fits this code."""
    with reporting(as_json):
        from postroad.surfaces import migrating

        act = {"apply": migrating.apply, "status": migrating.steps, "verify": migrating.verify}[action]
        act(database, schema, as_json)


@app.command()
def status(database: DatabaseOption = None, schema: SchemaOption = None, as_json: JsonOption = False) -> None:
    """Show how things stand: what waits, what is under way, what went wrong in the last hour.

    In JSON, ages are microseconds.
    """
    with reporting(as_json):
        from postroad.surfaces import reading, screens

        found = reading.look(database, schema, reading.snapshot)
        if as_json:
            show_json(found)
        else:
            screens.status(found)


@app.command("config")
def show_config(
    reference: Annotated[str | None, typer.Argument(metavar="[APP]", help="module:attribute of a Postroad.")] = None,
    as_json: JsonOption = False,
    bundled_sqlite: BundledOption = False,
) -> None:
    """Show every setting, without secrets, and which place decided it; of an APP, what its code says comes first."""
    use_bundled_sqlite(bundled_sqlite)
    with reporting(as_json):
        from postroad.surfaces import configuring

        configuring.show(reference, as_json)


@app.command()
def doctor(
    reference: Annotated[str, typer.Argument(metavar="APP", help="module:attribute of a Postroad.")],
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
    bundled_sqlite: BundledOption = False,
) -> None:
    """Look for what is wrong with an app's settings, its kinds and its database, and say what to do.

    Exit codes: 0 if there is no error (warnings may be), 1 if there is, 2 for wrong use. Nothing is changed.
    """
    use_bundled_sqlite(bundled_sqlite)
    with reporting(as_json):
        from postroad.surfaces import doctor as doctoring

        raise typer.Exit(doctoring.show(reference, database, schema, as_json))


@app.command()
def report(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name, type/id.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to say; - reads it from stdin.")],
    *,
    key: Annotated[str, typer.Option("--key", help="The same whenever the same is said: what came first stands.")],
    wait: Annotated[str, typer.Option("--wait", help="How long to wait for it to land, such as 5s.")] = "0",
    source: Annotated[str | None, typer.Option("--source", help="The stream it comes from.")] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Whose the source must be.")] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="module:attribute of a Postroad: its rules, its database."),
    ] = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell a stream something: it lands in its log between turns, once for each key. It needs no loop to be accepted.

    Exit codes: 0 accepted, landed or not; 1 no database, or the key is taken; 2 wrong use, or a source that is refused.
    """
    with reporting(as_json):
        if app is not None:  # first: it may settle which SQLite this process uses
            from postroad.surfaces.running import load

            load(app)
        from postroad.surfaces import telling

        entry = telling.report(
            stream, text, key=key, wait=wait, source=source, owner=owner, reference=app, database=database,
            schema=schema,
        )  # fmt: skip
        if as_json:
            show_json({"stream": stream, "key": key, "landed": entry is not None, "seq": entry and entry.seq})
        else:
            say(f"{key} is entry {entry.seq} of {stream}" if entry else f"{key} is accepted; it has not landed yet")


@app.command("ack")
def acknowledge(
    token: Annotated[
        str | None, typer.Argument(metavar="[TOKEN]", help="Better on stdin: others see a command's arguments.")
    ] = None,
    *,
    app: Annotated[
        str | None, typer.Option("--app", metavar="APP", help="module:attribute of a Postroad: its keys, its database.")
    ] = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Acknowledge a dispatch by its token, which is read from stdin: it is acked, and not sent again.

    Exit codes: 0 acknowledged, now or before; 1 no such dispatch, too late, or no database; 2 wrong use or bad token.
    """
    with reporting(as_json):
        if app is not None:  # first: it may settle which SQLite this process uses
            from postroad.surfaces.running import load

            load(app)
        from postroad.surfaces import acking

        dispatch = acking.acknowledge(token, app, database=database, schema=schema)
        if as_json:
            show_json({"dispatch": dispatch})
        else:
            say(f"acknowledged {dispatch}")


if __name__ == "__main__":
    main()
