"""The inbox: what waits for a stream's next turn.

Publishing inserts its own rows and touches nothing else, so that an open user transaction blocks nobody. An
event that was consumed has MOVED into the log, so "was it here before?" is asked of both: the unique index
answers for the inbox while inserting; for the log it is asked in a LATER statement, whose snapshot shows any
turn that committed before the insert got through, and the insert is undone if the event stands there. The same
statement asks for the tombstones of dead events that retention has deleted.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from postroad.model import ids, payload, reports
from postroad.model.errors import ConcurrencyConflict, KeyConflict, Refused, StreamDeleted
from postroad.model.events import REPORT_NAME
from postroad.model.failpoints import failpoint
from postroad.model.rows import NewEvent, Published
from postroad.store import tombstones
from postroad.store.log import LANDED, EventKey
from postroad.store.statements import Found, Row, Statement, as_json

ROUNDS = 8

# For rows that are named by their position. `reason IS NULL` would offer the planner an index of all that
# waits, which it believes to be short.
UNDEAD = "coalesce(reason, '-') = '-'"

# By stream first: two publishers of many streams then meet their rows in one order. Within a stream the order
# given is the order of the positions.
_INSERT = Statement(
    "INSERT INTO {p}inbox (stream, type, event_id, kind, version, data, received_at, ready_at) "
    "SELECT e.stream, e.type, e.event_id, e.kind, e.version, e.data, :now, e.ready_at "
    "FROM {rows:e(stream text, type text, event_id text, kind text, version int, data text, ready_at int)} "
    "WHERE true ORDER BY e.stream, e.ord ON CONFLICT (stream, event_id) DO NOTHING "
    "RETURNING stream, event_id, position"
)
_HELD = Statement(
    "SELECT stream, event_id, position, kind, data, deleted_at FROM ("
    "SELECT e.stream AS stream, e.event_id AS event_id, "
    "(SELECT s.deleted_at FROM {p}streams s WHERE s.id = e.stream) AS deleted_at, "
    + ", ".join(
        f"(SELECT i.{name} FROM {{p}}inbox i WHERE i.stream = e.stream AND i.event_id = e.event_id) AS {name}"
        for name in ("position", "kind", "data")
    )
    + " FROM {rows:e(stream text, event_id text)}) AS found WHERE position IS NOT NULL"
)
_OVER = Statement(
    "SELECT stream, event_id, seq, buried, deleted_at FROM "
    "(SELECT e.stream AS stream, e.event_id AS event_id, " + LANDED + " AS seq, " + tombstones.OF_EVENT + " AS buried, "
    "(SELECT s.deleted_at FROM {p}streams s WHERE s.id = e.stream) AS deleted_at "
    "FROM {rows:e(stream text, event_id text)}) AS found "
    "WHERE seq IS NOT NULL OR buried IS NOT NULL OR deleted_at IS NOT NULL"
)
# Not a join: where the planner takes the log for empty it would read all of it.
_ENTRIES = Statement(
    "SELECT e.stream AS stream, "
    + ", ".join(
        f"(SELECT l.{column} FROM {{p}}log l WHERE l.stream = e.stream AND l.seq = e.seq) AS {name}"
        for column, name in (("entry_id", "event_id"), ("kind", "kind"), ("data", "data"))
    )
    + " FROM {rows:e(stream text, seq int)}"
)
_DELETE = Statement("DELETE FROM {p}inbox WHERE position {in_ints:positions}")
_WAITING = Statement(
    "SELECT count(*) FROM {p}inbox WHERE type = :type AND stream = :stream AND reason IS NULL AND position < :position"
)
_LAST_POSITION = 2**63 - 1


class First(NamedTuple):
    """The event that holds an id: where it waits (None: no more) and what it is; of one that is gone, its hash."""

    position: int | None
    kind: str = ""
    data: str = ""
    content_hash: str = ""

    def is_same(self, event: NewEvent) -> bool:
        """Whether this event has the same content, or takes any other of its kind for it."""
        if event.keep and self.kind in ("", event.kind):
            return True
        if self.content_hash:
            return self.content_hash == payload.content_hash(event.kind, event.data)
        data = reports.accepted(self.data) if self.kind == REPORT_NAME else self.data
        return payload.same_content(event.kind, event.data, self.kind, data)


def publish(conn: Connection, events: Sequence[NewEvent], *, now: int) -> list[Published]:
    """Put events into their streams' inboxes; answers in the order given.

    An event that was accepted before, in whatever state it is now, is answered with the first one's place.
    In a REPEATABLE READ transaction the log may be seen too old for that; the claim then drops the event.

    Raises:
        KeyConflict: The id is taken by other content. Nothing was written.
        StreamDeleted: The stream was deleted. Nothing was written.
    """
    failpoint("inbox.publish")
    left = _distinct(events)
    made: set[int] = set()
    answers: dict[EventKey, Published] = {}
    try:
        for _ in range(ROUNDS):
            if left:
                answers |= _round(conn, left, made, now=now)
                left = {key: event for key, event in left.items() if key not in answers}
        if left:
            raise ConcurrencyConflict("Others keep publishing and undoing these events.", stream=min(left)[0])
    except (Refused, ConcurrencyConflict):
        _undo(conn, made)
        raise
    failpoint("inbox.published")
    return _in_order(events, answers)


def is_same(conn: Connection, event: NewEvent) -> bool:
    """Whether publishing this event would be taken for the one that holds its id, if any does.

    Raises:
        StreamDeleted: The stream that the other one was published to was deleted.
    """
    keys = [(event.stream, event.event_id)]
    first = _held(conn, keys) or _landed(conn, keys)
    return all(found.is_same(event) for found in first.values())


def add(conn: Connection, events: Sequence[NewEvent], *, now: int) -> None:
    """Put events into inboxes of which the caller knows, by a lock that others respect, that they are new."""
    failpoint("inbox.publish")
    _insert(conn, events, now=now)
    failpoint("inbox.published")


def _distinct(events: Sequence[NewEvent]) -> dict[EventKey, NewEvent]:
    distinct: dict[EventKey, NewEvent] = {}
    for event in events:
        first = distinct.setdefault((event.stream, event.event_id), event)
        if first is not event:
            _compare(event, First(None, first.kind, first.data))
    return distinct


def _in_order(events: Sequence[NewEvent], answers: dict[EventKey, Published]) -> list[Published]:
    ordered: list[Published] = []
    for event in events:
        key = (event.stream, event.event_id)
        answer = answers[key]
        ordered.append(answer)
        if answer.created:  # the same event once more in this call
            answers[key] = Published(event.event_id, answer.position, created=False)
    return ordered


def _round(
    conn: Connection, left: Mapping[EventKey, NewEvent], made: set[int], *, now: int
) -> dict[EventKey, Published]:
    """Insert what is left, then see what became of it; those neither inserted nor found are left out."""
    inserted = _insert(conn, left.values(), now=now)
    new = {(row.stream, row.event_id): row.position for row in inserted}
    made |= set(new.values())
    first = _held(conn, left.keys() - new.keys())
    landed = _landed(conn, left.keys() - first.keys())
    undone = {new[key] for key in landed if key in new}
    _undo(conn, undone)
    made -= undone
    first |= landed
    for key, found in first.items():
        _compare(left[key], found)
    same = {key: Published(key[1], found.position, created=False) for key, found in first.items()}
    return same | {key: Published(key[1], new[key], created=True) for key in new.keys() - landed.keys()}


def _insert(conn: Connection, events: Collection[NewEvent], *, now: int) -> Found:
    rows = [
        {
            "stream": event.stream,
            "type": ids.stream_type(event.stream),
            "event_id": event.event_id,
            "kind": event.kind,
            "version": event.version,
            "data": event.data,
            "ready_at": now if event.ready_at is None else event.ready_at,
        }
        for event in events
    ]
    return _INSERT.for_rows(conn, rows, now=now)


def _held(conn: Connection, keys: Collection[EventKey]) -> dict[EventKey, First]:
    if not keys:
        return {}
    found = _HELD.for_rows(conn, _keys(keys)).all()
    _refuse_deleted(found)
    return {(row.stream, row.event_id): First(row.position, row.kind, row.data) for row in found}


def _landed(conn: Connection, keys: Collection[EventKey]) -> dict[EventKey, First]:
    """Those that stand in the log, or died and left a tombstone; StreamDeleted if one's stream is deleted."""
    over = _OVER.for_rows(conn, _keys(keys)).all() if keys else []
    _refuse_deleted(over)
    if not over:
        return {}
    buried = {(row.stream, row.event_id): First(None, content_hash=row.buried) for row in over if row.buried}
    places = [{"stream": row.stream, "seq": row.seq} for row in over if row.seq is not None]
    found = _ENTRIES.for_rows(conn, places) if places else ()
    return buried | {(row.stream, row.event_id): First(None, row.kind, row.data) for row in found}


def _refuse_deleted(found: Sequence[Row]) -> None:
    for row in found:
        if row.deleted_at is not None:
            raise StreamDeleted(row.stream, stream=row.stream)


def _keys(keys: Iterable[EventKey]) -> list[dict[str, str]]:
    return [{"stream": stream, "event_id": event_id} for stream, event_id in sorted(keys)]


def _compare(event: NewEvent, first: First) -> None:
    if not first.is_same(event):
        other = f"as {first.kind}" if first.kind not in ("", event.kind) else "with other content"
        raise KeyConflict(
            f"{event.event_id} of {event.stream} came before {other}: what is new needs another key.",
            key=event.event_id,
            stream=event.stream,
        )


def _undo(conn: Connection, positions: Collection[int]) -> None:
    if positions:
        _DELETE(conn, positions=as_json(sorted(positions)))


def waiting(conn: Connection, stream: str) -> int:
    """How many events of the stream wait, dead ones not counted."""
    return before(conn, stream, _LAST_POSITION)


def before(conn: Connection, stream: str, position: int) -> int:
    """How many events of the stream wait in front of this position."""
    return int(_WAITING(conn, type=ids.stream_type(stream), stream=stream, position=position).scalar_one())
