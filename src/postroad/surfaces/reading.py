"""What the reading commands ask of a database. They create and migrate nothing, and need no loop to run."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from sqlalchemy import Connection, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from postroad.engine.config import database_url, masked, settings
from postroad.model.clock import moment
from postroad.model.events import Entry
from postroad.model.operations import OperationRow
from postroad.store import dialects, log, migrations, operations, runs, status, stream_views
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.surfaces.output import NotFound, Unavailable, WrongUse, say_error

T = TypeVar("T")
ON_THE_COMMAND_LINE = (
    "a password on the command line is seen in the list of processes and kept in the shell's history: "
    "use POSTROAD_DATABASE_URL or postroad.toml"
)


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """A stream with the part of its log that was asked for. `queue` None: nobody holds it.

    `state` is what it is about, one of five words (`post.streams`). `why` is a sentence on what its waiting events wait
    for, as far as the database knows; '' if none wait.
    """

    stream: str
    version: int
    deleted_at: str | None
    queue: dict[str, Any] | None
    entries: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    dead: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    operations: list[dict[str, Any]] = []
    why: str = ""
    state: str = "idle"


@contextmanager
def opened(
    url: str | None, schema: str | None, *, writing: bool = False, creating: bool = False, waiting: bool = False
) -> Iterator[Database]:
    """The database that the command line or the settings name: to read, to write, or to be made if it is not there.

    `waiting`: others may wait for what happens in it, as a `Hub` does.

    Raises:
        Unavailable: It cannot be reached or read.
        WrongUse: None is configured, or its URL is wrong.
    """
    place, _ = database_url(url)
    if url is not None and parsed(place).password:
        say_error(ON_THE_COMMAND_LINE)
    chosen = settings({"schema": schema})["schema"].value
    with opened_at(place, chosen, writing=writing, creating=creating, waiting=waiting) as database:
        yield database


@contextmanager
def opened_at(
    place: str, schema: str | None, *, writing: bool = False, creating: bool = False, waiting: bool = False
) -> Iterator[Database]:
    """The database with this URL, as `opened` opens it."""
    wanted = parsed(place)
    is_sqlite = wanted.get_backend_name() == "sqlite"
    database = Database(
        _existing(wanted, writing=writing) if is_sqlite and not creating else wanted,
        schema=None if is_sqlite else schema,
        executor=None if waiting else Inline(),
    )
    try:
        with reachable(masked(place)):
            yield database
    finally:
        database.close()


@contextmanager
def changing(url: str | None, schema: str | None, *, waiting: bool = False) -> Iterator[Database]:
    """The database that the command line or the settings name, to write; its schema must fit."""
    with opened(url, schema) as database:  # a file that is not ours stays as it is
        database.read(migrations.check)
    with opened(url, schema, writing=True, waiting=waiting) as database:
        yield database


def parsed(place: str) -> URL:
    """A database's URL in its parts; WrongUse if it is none."""
    try:
        return make_url(place)
    except (ArgumentError, ValueError) as error:
        raise WrongUse(f"{masked(place)} is not a database's URL.", field="database") from error


@contextmanager
def reachable(place: str) -> Iterator[None]:
    """Say in one line of a database, at a place that is shown as it is, that it cannot be reached or read.

    Raises:
        Unavailable: Instead of the driver's own errors.
    """
    try:
        yield
    except DBAPIError as error:
        raise Unavailable(f"{place}: {' '.join(str(error.orig).split())}") from error
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise Unavailable(f"{place}: {error}") from error


def look(url: str | None, schema: str | None, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`fn(conn, *args, now=…, **kwargs)` over one view of the database, whose schema must fit this code."""

    def checked(conn: Connection) -> T:
        migrations.check(conn)
        now = dialects.database_micros(conn) or database.clock.wall()
        return fn(conn, *args, now=now, **kwargs)

    with opened(url, schema) as database:
        return database.read(checked)


def snapshot(conn: Connection, *, now: int) -> status.Snapshot:
    """How things stand."""
    return status.snapshot(conn, now=now)


def stream(conn: Connection, name: str, *, after: int | None, limit: int, now: int) -> StreamView:
    """A stream: its entries after place `after` or its last ones, what waits, what went dead, its runs.

    Raises:
        NotFound: There is no trace of such a stream.
    """
    entries = log.last(conn, name, limit=limit) if after is None else log.read(conn, name, after=after, limit=limit)
    seen = stream_views.row(conn, name, now=now)
    ran = runs.of_stream(conn, name, limit=limit)
    if seen is None and not ran:
        raise NotFound(f"No stream {name!r}.", stream=name)
    queue, deleted_at = stream_views.queue(conn, name), None if seen is None else seen.deleted_at
    return StreamView(
        stream=name,
        version=0 if seen is None else seen.version,
        deleted_at=None if deleted_at is None else deleted_at.isoformat(),
        queue=None if queue is None else plain(queue),
        entries=[_entry(entry) for entry in entries],
        waiting=[_event(event) for event in stream_views.waiting(conn, name, limit=limit)],
        dead=[_event(event) for event in stream_views.dead(conn, name, limit=limit)],
        runs=[plain(run) for run in ran],
        operations=[_operation(row) for row in operations.of_stream(conn, name, limit=limit)],
        why="" if seen is None else seen.why,
        state="idle" if seen is None else seen.state,
    )


def plain(row: msgspec.Struct) -> dict[str, Any]:
    """A row as plain values, its times as ISO 8601."""
    values: Mapping[str, Any] = msgspec.structs.asdict(row)
    return {name: _iso(value) if name in _TIMES else value for name, value in values.items()}


_TIMES = frozenset({"until", "heard_at", "received_at", "ready_at", "started_at", "ended_at", "applied_at"})


def _existing(url: URL, *, writing: bool) -> URL:
    """The same SQLite file, for reading only unless `writing`; Unavailable if it isn't there."""
    path = url.database or ""
    if not os.path.isfile(path):
        raise Unavailable(f"There is no file {path or '(no name)'}.")
    if writing:
        return url
    return URL.create("sqlite", database=f"file:{quote(path)}", query={"mode": "ro", "uri": "true"})


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "key": entry.key,
        "kind": entry.kind,
        "version": entry.version,
        "data": msgspec.Raw(entry.raw.encode()),
        "received_at": entry.received_at.isoformat(),
        "recorded_at": entry.recorded_at.isoformat(),
        "cause": entry.cause,
    }


def _event(event: stream_views.QueuedEvent) -> dict[str, Any]:
    return {**plain(event), "data": msgspec.Raw(event.data.encode())}


def _operation(row: OperationRow) -> dict[str, Any]:
    result = msgspec.Raw(row.result.encode()) if row.finished and row.result is not None else row.result
    return {**plain(row), "arguments": msgspec.Raw(row.arguments.encode()), "result": result}


def _iso(stamp: int | None) -> str | None:
    return None if stamp is None else moment(stamp).isoformat()
