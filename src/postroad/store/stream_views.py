"""A stream as operators see it: what waits, what went dead, who holds it. Reads only."""

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.clock import moment
from postroad.model.lifecycle import QueueState
from postroad.model.streams import StreamRow, StreamState, WaitingEvent
from postroad.store import dialects
from postroad.store.statements import Statement

LOOKED_AT_MAX = 100
DEAD_MAX = 10_000
STATES: Sequence[StreamState] = ("idle", "waiting", "running", "backing_off", "parked")
_LAST_NAME = chr(0x10FFFF)


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
# `reason IS NOT NULL` would offer the planner an index of all that is dead, whatever its stream.
_DEAD_COUNT = Statement(
    "SELECT count(*) FROM (SELECT 1 FROM {p}inbox WHERE stream = :stream AND coalesce(reason, '-') <> '-' LIMIT :most) "
    "AS part"
)
# Each by name along the key of its table.
_OF_STREAMS = Statement(
    "SELECT id FROM {p}streams WHERE id > :after AND id < :end AND deleted_at IS NULL ORDER BY id LIMIT :limit"
)
_OF_QUEUES = Statement(
    "SELECT stream FROM {p}queues WHERE stream > :after AND stream < :end ORDER BY stream LIMIT :limit"
)
_FIRST_AFTER = "(SELECT i.stream FROM {p}inbox i WHERE i.stream > %s ORDER BY i.stream LIMIT 1)"
_OF_INBOX = Statement(
    "WITH RECURSIVE walk(stream, step) AS ("
    f"SELECT {_FIRST_AFTER % ':after'}, 1 "
    f"UNION ALL SELECT {_FIRST_AFTER % 'walk.stream'}, walk.step + 1 FROM walk "
    "WHERE walk.stream IS NOT NULL AND walk.step < :limit) "
    "SELECT stream FROM walk WHERE stream IS NOT NULL AND stream < :end"
)
# Where the streams of a state are found: those that are held have a row in queues, and what waits stands in an inbox.
_SOURCES: Mapping[StreamState | None, Sequence[Statement]] = {
    None: (_OF_STREAMS, _OF_QUEUES, _OF_INBOX),
    "idle": (_OF_STREAMS,),
    "waiting": (_OF_INBOX,),
    "running": (_OF_QUEUES,),
    "backing_off": (_OF_QUEUES,),
    "parked": (_OF_QUEUES,),
}


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which streams a list shows: those that fit all that is given, with names after `after`."""

    type: str | None = None
    state: StreamState | None = None
    after: str = ""


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
    events, held = waiting(conn, stream, limit=LOOKED_AT_MAX), queue(conn, stream)
    return _why(conn, stream, head(conn, stream), events, held, now=now)


def row(conn: Connection, stream: str, *, now: int) -> StreamRow | None:
    """A stream as its operators see it; None: there is no trace of it."""
    begun, held, events = head(conn, stream), queue(conn, stream), waiting(conn, stream, limit=LOOKED_AT_MAX)
    dead_count = int(_DEAD_COUNT(conn, stream=stream, most=DEAD_MAX).scalar_one())
    if begun is None and held is None and not events and not dead_count:
        return None
    state = state_of(held, waits=bool(events), now=now)
    until = None if held is None or state not in ("running", "backing_off") else held.until
    deleted_at = None if begun is None else begun.deleted_at
    return StreamRow(
        stream=stream,
        type=ids.stream_type(stream),
        version=0 if begun is None else begun.version,
        deleted_at=None if deleted_at is None else moment(deleted_at),
        state=state,
        attempts=0 if held is None else held.attempts,
        until=None if until is None else moment(until),
        why=_why(conn, stream, begun, events, held, now=now),
        waiting=tuple(
            WaitingEvent(position=place, key=one.event_id, kind=one.kind, received_at=moment(one.received_at))
            for place, one in enumerate(events)
        ),
        dead=dead_count,
    )


def list_(conn: Connection, wanted: Wanted, *, limit: int, now: int) -> list[StreamRow]:
    """Streams by name. Deleted ones are left out, unless a queue or an inbox still holds something of theirs."""
    dialects.distrust_statistics(conn)
    found: list[StreamRow] = []
    after = wanted.after
    while len(found) < limit and (names := _names(conn, wanted, after, limit)):
        rows = (row(conn, name, now=now) for name in names)
        found += [one for one in rows if one is not None and wanted.state in (None, one.state)]
        after = names[-1]
    return found[:limit]


def state_of(held: QueueView | None, *, waits: bool, now: int) -> StreamState:
    """What a stream is about. A claim or a back-off that is over is nobody's any more: what is left waits."""
    if held is not None and held.state == QueueState.PARKED:
        return "parked"
    if held is not None and held.until is not None and held.until > now:
        if held.state == QueueState.CLAIMED:
            return "running"
        if held.state == QueueState.BACKOFF:
            return "backing_off"
    return "waiting" if waits else "idle"


def _names(conn: Connection, wanted: Wanted, after: str, limit: int) -> list[str]:
    """The next names, at most `limit`, among which the streams that are wanted are."""
    first, end = ("", _LAST_NAME) if wanted.type is None else (f"{wanted.type}/", f"{wanted.type}0")
    given = {"after": max(after, first), "end": end, "limit": limit}
    found = {name for source in _SOURCES[wanted.state] for name in source(conn, **given).scalars()}
    return sorted(found)[:limit]


def _why(
    conn: Connection,
    stream: str,
    begun: StreamHead | None,
    events: Sequence[QueuedEvent],
    held: QueueView | None,
    *,
    now: int,
) -> str:
    if not events:
        return ""
    kind = ids.stream_type(stream)
    match held.state if held else "":
        case _ if begun is not None and begun.deleted_at is not None:
            return f"The stream was deleted at {_at(begun.deleted_at)}: its events are dropped, with a reason."
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
