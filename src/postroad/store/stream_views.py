"""A stream as operators see it: what waits, what went dead, who holds it. Reads only.

However many streams are asked about, there is one number of statements: a list costs what it shows.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.clock import moment
from postroad.model.lifecycle import QueueState
from postroad.model.streams import EventRow, StreamRow, StreamState, WaitingEvent
from postroad.store import dialects, inbox
from postroad.store.statements import Statement, as_json
from postroad.store.status import DROPPED

LOOKED_AT_MAX = 100
DEAD_MAX = 10_000
NAMES_AT_ONCE = 200  # of which those in a state are shown
STATES: Sequence[StreamState] = ("idle", "waiting", "running", "backing_off", "parked")
_LAST_NAME = chr(0x10FFFF)
_LAST_POSITION = 2**63 - 1


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
    """The claim, back-off or park of a stream; `until` None: it waits for a person. Times in microseconds.

    `heard_at` is when the claimant last said that it is there; None: there is none, or it was of older code.
    """

    state: str
    until: int | None
    attempts: int
    heard_at: int | None = None


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries a stream has, and when it was deleted (microseconds), if it was."""

    version: int
    deleted_at: int | None


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """An event that waits, without what it says."""

    stream: str
    event_id: str
    kind: str
    received_at: int
    ready_at: int


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one stream."""

    stream: str
    head: StreamHead | None
    held: QueueView | None
    events: list[_Place] = []
    dead: int = 0


_EVENT = "position, event_id, kind, version, data, received_at, ready_at, reason"
# `reason IS NOT NULL` would offer the planner an index of all that is dead, whatever its stream.
_IS_DEAD = "coalesce(reason, '-') <> '-'"
_WAITING = Statement(
    f"SELECT {_EVENT} FROM {{p}}inbox WHERE type = :type AND stream = :stream AND reason IS NULL "
    "AND position > :after ORDER BY position LIMIT :limit"
)
_DEAD = Statement(
    f"SELECT {_EVENT} FROM {{p}}inbox WHERE stream = :stream AND {_IS_DEAD} AND position < :after "
    "ORDER BY position DESC LIMIT :limit"
)
_HEARD_AT = "CASE WHEN claim_token IS NOT NULL THEN until - lease END"
_HELD = f"state, until, attempts, {_HEARD_AT} AS heard_at"
_QUEUE = Statement(f"SELECT {_HELD} FROM {{p}}queues WHERE stream = :stream")
_HEAD = Statement("SELECT version, deleted_at FROM {p}streams WHERE id = :stream")
_CLAIMS = Statement(
    "SELECT value AS type, (SELECT count(*) FROM {p}queues AS q "
    "WHERE q.type = value AND q.until > :now AND q.state = 'claimed') AS held FROM {list:types}"  # until: the index
)
# Of each stream a row of scalars, each looked up by a key: a join would be planned as a walk.
_SEEN = Statement(
    "SELECT asked.name, "
    + ", ".join(
        f"(SELECT {what} FROM {{p}}{table} WHERE {key} = asked.name) AS {name}"
        for table, key, name, what in (
            ("streams", "id", "version", "version"),
            ("streams", "id", "deleted_at", "deleted_at"),
            ("queues", "stream", "state", "state"),
            ("queues", "stream", "until", "until"),
            ("queues", "stream", "attempts", "attempts"),
            ("queues", "stream", "heard_at", _HEARD_AT),
        )
    )
    + f", (SELECT count(CASE WHEN reason NOT IN {DROPPED} THEN 1 END) FROM (SELECT reason FROM {{p}}inbox "
    f"WHERE stream = asked.name AND {_IS_DEAD} LIMIT :dead) AS cut"
    ") AS dead, CAST((SELECT {json_agg}(front.position) FROM (SELECT i.position FROM {p}inbox AS i "
    "WHERE i.type = asked.type AND i.stream = asked.name AND i.reason IS NULL ORDER BY i.position LIMIT :most"
    ") AS front) AS text) AS waiting FROM {rows:asked(name text, type text)} ORDER BY asked.ord"
)
_PLACES = Statement(
    "SELECT stream, event_id, kind, received_at, ready_at FROM {p}inbox WHERE position {in_ints:positions} "
    "ORDER BY position"
)


_WAITS = Statement("SELECT 1 FROM {p}inbox WHERE position = :position AND " + inbox.UNDEAD)


def _of_queues(which: str) -> Statement:
    return Statement(
        f"SELECT stream FROM {{p}}queues WHERE stream > :after AND stream < :end{which} ORDER BY stream LIMIT :limit"
    )


# Each by name along the key of its table.
_OF_STREAMS = Statement(
    "SELECT id FROM {p}streams WHERE id > :after AND id < :end AND deleted_at IS NULL ORDER BY id LIMIT :limit"
)
_OF_QUEUES, _OF_CLAIMED, _OF_BACKOFF = map(_of_queues, ("", " AND state = 'claimed'", " AND state = 'backoff'"))
_OF_PARKED = _of_queues(" AND until IS NULL")
_FIRST_AFTER = "(SELECT i.stream FROM {p}inbox i WHERE i.stream > %s ORDER BY i.stream LIMIT 1)"
_OF_INBOX = Statement(
    "WITH RECURSIVE walk(stream, step) AS ("
    f"SELECT {_FIRST_AFTER % ':after'}, 1 "
    f"UNION ALL SELECT {_FIRST_AFTER % 'walk.stream'}, walk.step + 1 FROM walk "
    "WHERE walk.stream IS NOT NULL AND walk.stream < :end AND walk.step < :limit) "
    "SELECT stream FROM walk WHERE stream IS NOT NULL AND stream < :end"
)
# Where the streams of a state are found: those that are held have a row in queues, and what waits stands in an inbox.
_SOURCES: Mapping[StreamState | None, Sequence[Statement]] = {
    None: (_OF_STREAMS, _OF_QUEUES, _OF_INBOX),
    "idle": (_OF_STREAMS,),
    "waiting": (_OF_INBOX,),
    "running": (_OF_CLAIMED,),
    "backing_off": (_OF_BACKOFF,),
    "parked": (_OF_PARKED,),
}


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which streams a list shows: those that fit all that is given, with names after `after`."""

    type: str | None = None
    state: StreamState | None = None
    after: str = ""


def waiting(conn: Connection, stream: str, *, limit: int, after: int = 0) -> list[QueuedEvent]:
    """The events that wait for a turn, oldest first, behind a position."""
    dialects.distrust_statistics(conn)
    kind = ids.stream_type(stream)
    return _WAITING(conn, type=kind, stream=stream, after=after, limit=limit).into(QueuedEvent)


def dead(conn: Connection, stream: str, *, limit: int, after: int = _LAST_POSITION) -> list[QueuedEvent]:
    """The events that no turn could process, newest first, from a position down."""
    dialects.distrust_statistics(conn)
    return _DEAD(conn, stream=stream, after=after, limit=limit).into(QueuedEvent)


def events(conn: Connection, stream: str, *, dead_ones: bool, after: int | None, limit: int) -> list[EventRow]:
    """A page of the events that wait, or of those that went dead, with what they say."""
    given = {"limit": limit} if after is None else {"limit": limit, "after": after}
    found = dead(conn, stream, **given) if dead_ones else waiting(conn, stream, **given)
    return [
        EventRow(
            stream=stream,
            key=one.event_id,
            kind=one.kind,
            raw=one.data,
            version=one.version,
            received=one.received_at,
            cursor=one.position,
            reason=one.reason,
            ended=None if one.reason is None else one.ready_at,
        )
        for one in found
    ]


def place(conn: Connection, stream: str, position: int) -> int | None:
    """How many events of its stream wait in front of the one at this position; None: it does not wait any more."""
    dialects.distrust_statistics(conn)
    waits = _WAITS(conn, position=position).scalar_one_or_none() is not None
    return inbox.before(conn, stream, position) if waits else None


def queue(conn: Connection, stream: str) -> QueueView | None:
    """Who or what holds the stream; None: it is free."""
    return next(iter(_QUEUE(conn, stream=stream).into(QueueView)), None)


def head(conn: Connection, stream: str) -> StreamHead | None:
    """The stream's version; None: it has no entries and was never deleted."""
    return next(iter(_HEAD(conn, stream=stream).into(StreamHead)), None)


def row(conn: Connection, stream: str, *, now: int) -> StreamRow | None:
    """A stream as its operators see it; None: there is no trace of it."""
    dialects.distrust_statistics(conn)
    return next(iter(_rows(conn, [stream], now=now)), None)


def list_(conn: Connection, wanted: Wanted, *, limit: int, now: int) -> list[StreamRow]:
    """Streams by name. Deleted ones are left out, unless a queue or an inbox still holds something of theirs."""
    dialects.distrust_statistics(conn)
    page = limit if wanted.state is None else max(limit, NAMES_AT_ONCE)
    found: list[StreamRow] = []
    names, after = [""] * page, wanted.after
    while len(found) < limit and len(names) == page:
        names = _names(conn, wanted, after, page)
        found += [one for one in _rows(conn, names, now=now) if wanted.state in (None, one.state)]
        after = names[-1] if names else after
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


def silent_since(held: QueueView | None, *, now: int) -> int | None:
    """Since when a claimant whose claim runs has not been heard of, if it should have been.

    It renews at a third of its lease. Half of it without a word is more than it takes to be late.
    """
    if held is None or held.heard_at is None or held.until is None or held.until <= now:
        return None
    return held.heard_at if now - held.heard_at > (held.until - held.heard_at) // 2 else None


def _names(conn: Connection, wanted: Wanted, after: str, limit: int) -> list[str]:
    """The next names, at most `limit`, among which the streams that are wanted are."""
    first, end = ("", _LAST_NAME) if wanted.type is None else (f"{wanted.type}/", f"{wanted.type}0")
    given = {"after": max(after, first), "end": end, "limit": limit}
    found = {name for source in _SOURCES[wanted.state] for name in source(conn, **given).scalars()}
    return sorted(found)[:limit]


def _rows(conn: Connection, streams: Sequence[str], *, now: int) -> list[StreamRow]:
    """Streams in the order given; those of which there is no trace are left out."""
    seen = [one for one in _seen(conn, streams) if one.head or one.held or one.events or one.dead]
    claims = _claims(conn, {ids.stream_type(one.stream) for one in seen if _is_free(one, now)}, now=now)
    return [_row(one, claims, now=now) for one in seen]


def _seen(conn: Connection, streams: Sequence[str]) -> list[_Seen]:
    if not streams:
        return []
    asked = as_json([{"name": name, "type": ids.stream_type(name)} for name in streams])
    found = _SEEN(conn, asked=asked, dead=DEAD_MAX, most=LOOKED_AT_MAX).all()
    positions = [place for one in found for place in msgspec.json.decode(one.waiting or "[]", type=list[int])]
    events: dict[str, list[_Place]] = {}
    for place in _PLACES(conn, positions=as_json(positions)).into(_Place) if positions else ():
        events.setdefault(place.stream, []).append(place)
    return [
        _Seen(
            stream=one.name,
            head=None if one.version is None else StreamHead(version=one.version, deleted_at=one.deleted_at),
            held=None
            if one.state is None
            else QueueView(state=one.state, until=one.until, attempts=one.attempts, heard_at=one.heard_at),
            events=events.get(one.name, []),
            dead=one.dead,
        )
        for one in found
    ]


def _is_free(one: _Seen, now: int) -> bool:
    """Whether nothing but the want of a worker keeps its events waiting."""
    deleted = one.head is not None and one.head.deleted_at is not None
    waits = state_of(one.held, waits=bool(one.events), now=now) == "waiting"
    return waits and not deleted and min(event.ready_at for event in one.events) <= now


def _claims(conn: Connection, types: Collection[str], *, now: int) -> dict[str, int]:
    """How many streams of each type are claimed."""
    if not types:
        return {}
    return {row.type: row.held for row in _CLAIMS(conn, types=as_json(sorted(types)), now=now)}


def _row(one: _Seen, claims: Mapping[str, int], *, now: int) -> StreamRow:
    state = state_of(one.held, waits=bool(one.events), now=now)
    deleted_at = None if one.head is None else one.head.deleted_at
    until = None if one.held is None or state not in ("running", "backing_off") else one.held.until
    silent = silent_since(one.held, now=now)
    return StreamRow(
        stream=one.stream,
        type=ids.stream_type(one.stream),
        version=0 if one.head is None else one.head.version,
        deleted_at=None if deleted_at is None else moment(deleted_at),
        state=state,
        attempts=0 if one.held is None else one.held.attempts,
        until=None if until is None else moment(until),
        silent_since=None if silent is None else moment(silent),
        why=_why(one, state, claims, now=now),
        waiting=tuple(
            WaitingEvent(position=place, key=event.event_id, kind=event.kind, received_at=moment(event.received_at))
            for place, event in enumerate(one.events)
        ),
        dead=one.dead,
    )


def _why(one: _Seen, state: StreamState, claims: Mapping[str, int], *, now: int) -> str:
    if not one.events:
        return ""
    until = _at(one.held.until) if one.held is not None and one.held.until is not None else ""
    ready, kind = min(event.ready_at for event in one.events), ids.stream_type(one.stream)
    match state:
        case _ if one.head is not None and one.head.deleted_at is not None:
            return f"The stream was deleted at {_at(one.head.deleted_at)}: its events are dropped, with a reason."
        case "parked":
            return "Events wait because the stream is parked; a person must let it go."
        case "backing_off":
            return f"Events wait for the next attempt at {until}: the last one failed (see the runs)."
        case "running" if (silent := silent_since(one.held, now=now)) is not None:
            return (
                f"Events wait for a turn whose worker was last heard of at {_at(silent)}; "
                f"another one may take it over at {until}."
            )
        case "running":
            return f"Events wait for the turn that is under way; its claim ends at {until} if not renewed."
        case _ if ready > now:
            return f"Events wait for their time, {_at(ready)} at the earliest."
    held = claims.get(kind, 0)
    known = f"workers of its type hold others ({held})." if held else f"is a worker for the type {kind!r} running?"
    return f"Events have waited since {_at(ready)} and nobody holds the stream: {known}"


def _at(stamp: int) -> str:
    return moment(stamp).strftime("%Y-%m-%d %H:%M:%SZ")
