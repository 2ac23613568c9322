"""A stream as operators see it: what waits, what went dead, who holds it. Reads only."""

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.clock import moment
from postroad.store.statements import Statement

LOOKED_AT_MAX = 100


class QueuedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event in a stream's inbox. `reason` None: it waits; else why it went dead. Times in microseconds."""

    position: int
    event_id: str
    kind: str
    version: int
    data: str
    received_at: int
    ready_at: int
    reason: str | None


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The claim, back-off or park of a stream; `until` None: it waits for a person. Time in microseconds."""

    state: str
    until: int | None
    attempts: int


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries a stream has, and when it was deleted (microseconds), if it was."""

    version: int
    deleted_at: int | None


_EVENT = "position, event_id, kind, version, data, received_at, ready_at, reason"
_WAITING = Statement(
    f"SELECT {_EVENT} FROM {{p}}inbox WHERE type = :type AND stream = :stream AND reason IS NULL "
    "ORDER BY position LIMIT :limit"
)
_DEAD = Statement(
    f"SELECT {_EVENT} FROM {{p}}inbox WHERE stream = :stream AND reason IS NOT NULL ORDER BY position DESC LIMIT :limit"
)
_QUEUE = Statement("SELECT state, until, attempts FROM {p}queues WHERE stream = :stream")
_CLAIMS = Statement(
    "SELECT count(*) FROM {p}queues WHERE type = :type AND until > :now AND state = 'claimed'"  # until: the index
)
_HEAD = Statement("SELECT version, deleted_at FROM {p}streams WHERE id = :stream")


def waiting(conn: Connection, stream: str, *, limit: int) -> list[QueuedEvent]:
    """The events that wait for a turn, oldest first."""
    return _WAITING(conn, type=ids.stream_type(stream), stream=stream, limit=limit).into(QueuedEvent)


def dead(conn: Connection, stream: str, *, limit: int) -> list[QueuedEvent]:
    """The events that no turn could process, newest first."""
    return _DEAD(conn, stream=stream, limit=limit).into(QueuedEvent)


def queue(conn: Connection, stream: str) -> QueueView | None:
    """Who or what holds the stream; None: it is free."""
    return next(iter(_QUEUE(conn, stream=stream).into(QueueView)), None)


def head(conn: Connection, stream: str) -> StreamHead | None:
    """The stream's version; None: it has no entries and was never deleted."""
    return next(iter(_HEAD(conn, stream=stream).into(StreamHead)), None)


def why(conn: Connection, stream: str, *, now: int) -> str:
    """A sentence on why the stream's events wait, as far as the database knows; '' if none wait."""
    events = waiting(conn, stream, limit=LOOKED_AT_MAX)
    if not events:
        return ""
    kind = ids.stream_type(stream)
    held = queue(conn, stream)
    match held.state if held else "":
        case "parked":
            return "Events wait because the stream is parked; a person must let it go."
        case "backoff" if held and held.until is not None and held.until > now:
            return f"Events wait for the next attempt at {_at(held.until)}: the last one failed (see the runs)."
        case "claimed" if held and held.until is not None and held.until > now:
            return f"Events wait for the turn that is under way; its claim ends at {_at(held.until)} if not renewed."
    ready = min(event.ready_at for event in events)
    if ready > now:
        return f"Events wait for their time, {_at(ready)} at the earliest."
    claims = _CLAIMS(conn, type=kind, now=now).scalar_one()
    known = f"workers of its type hold others ({claims})." if claims else f"is a worker for the type {kind!r} running?"
    return f"Events have waited since {_at(ready)} and nobody holds the stream: {known}"


def _at(stamp: int) -> str:
    return moment(stamp).strftime("%Y-%m-%d %H:%M:%SZ")
