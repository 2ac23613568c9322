"""Timers: set by decisions, in the decision's transaction; the pump publishes their events in time.

A timer is one row per stream and key. Setting is idempotent for the same content and refused for anything
else that is known under the key; `rearm` starts a new generation, whose number is part of the event's id, so
that the event of an earlier generation, late or doubled, is never mistaken for it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from sqlalchemy import Connection

from postroad.model.errors import KeyConflict, StreamDeleted, TimerConflict
from postroad.model.events import TIMER_FIRED_NAME
from postroad.model.failpoints import failpoint
from postroad.model.ids import timer_event_id
from postroad.model.lifecycle import TimerStatus
from postroad.model.payload import same_content
from postroad.model.rows import NewAlert, NewEvent, TimerChange
from postroad.store import alerts, inbox
from postroad.store.statements import Statement, as_json


class TimerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A timer as it stands; times in microseconds. `spec` is `at` or `after` as it was given."""

    stream: str
    key: str
    status: str
    fire_at: int
    kind: str = TIMER_FIRED_NAME
    data: str = "{}"
    spec: str = ""
    generation: int = 0
    updated_at: int = 0


class FiredTimers(msgspec.Struct, frozen=True):
    """What one pass of the pump did: how many fired, how late the oldest of them was (microseconds).

    `dropped` were due but refused by the inbox (their stream was deleted): cancelled, with an alert.
    """

    count: int
    lag: int
    dropped: int = 0


class TimerStore(Protocol):
    """Where timers live. This module is the one that lives in the database of the decisions."""

    def apply(self, conn: Connection, changes: Sequence[TimerChange], *, now: int) -> None:
        """Set, rearm and cancel timers; cancels of one call come before its other changes."""

    def fire(self, conn: Connection, *, limit: int, now: int) -> FiredTimers:
        """Publish the events of at most `limit` due timers, the longest due first, and mark them fired."""

    def next_due(self, conn: Connection) -> int | None:
        """When the next armed timer is due; None when there is none."""

    def list_(self, conn: Connection, *, stream: str | None = None, limit: int = 50) -> list[TimerRow]:
        """A stream's timers by key, or the armed ones of all streams by time."""


# The limit is the number of rows that are there: it tells Postgres, which takes any JSON for a hundred rows, that
# a walk over the whole table is not worth it.
_KEYS = "{rows:keys(stream text, key text)} LIMIT :size"
# In order, so that two transactions that change the same timers cannot each wait for the other.
_LOCK = Statement(f"""
    SELECT 1 FROM {{p}}timers AS t WHERE (t.stream, t.key) IN (SELECT stream, key FROM {_KEYS})
    ORDER BY t.stream, t.key {{for_update}}
""")
_FIND = Statement(f"""
    SELECT stream, key, status, fire_at, kind, data, spec, generation, updated_at FROM {{p}}timers
    WHERE (stream, key) IN (SELECT stream, key FROM {_KEYS})
""")
_COLUMNS = "stream, key, fire_at, kind, data, spec, status, generation, updated_at"
_ROWS = (
    "{rows:timers(stream text, key text, fire_at int, kind text, data text, spec text, status text, "
    "generation int, updated_at int)}"
)
_INSERT = Statement(f"""
    INSERT INTO {{p}}timers ({_COLUMNS}) SELECT {", ".join("timers." + c for c in _COLUMNS.split(", "))}
    FROM {_ROWS} WHERE true ORDER BY timers.stream, timers.key
    ON CONFLICT (stream, key) DO NOTHING RETURNING stream, key
""")
_UNDO = Statement(f"DELETE FROM {{p}}timers WHERE (stream, key) IN (SELECT stream, key FROM {_KEYS})")
_UPDATE = Statement(f"""
    UPDATE {{p}}timers SET fire_at = timers.fire_at, data = timers.data, spec = timers.spec,
        status = timers.status, generation = timers.generation, updated_at = timers.updated_at
    FROM (SELECT * FROM {_ROWS} LIMIT :size) AS timers
    WHERE {{p}}timers.stream = timers.stream AND {{p}}timers.key = timers.key
""")
_DUE = Statement("""
    SELECT stream, key, status, fire_at, kind, data, spec, generation, updated_at FROM {p}timers
    WHERE status = 'armed' AND fire_at <= :now ORDER BY fire_at LIMIT :limit {skip_locked}
""")
_DELETED = Statement("""
    SELECT id FROM {p}streams
    WHERE id {in_list:streams} AND deleted_at IS NOT NULL
""")
_ARMED_IN = Statement("SELECT stream, key FROM {p}timers WHERE stream {in_list:streams} AND status = 'armed'")
_NEXT = Statement("SELECT fire_at FROM {p}timers WHERE status = 'armed' ORDER BY fire_at LIMIT 1")
_ARMED = Statement(f"""
    SELECT {_COLUMNS} FROM {{p}}timers WHERE status = 'armed' ORDER BY fire_at LIMIT :limit
""")
_OF_STREAM = Statement(f"""
    SELECT {_COLUMNS} FROM {{p}}timers WHERE stream = :stream ORDER BY key LIMIT :limit
""")

_TRIES = 3
_Place = tuple[str, str]


def apply(conn: Connection, changes: Sequence[TimerChange], *, now: int) -> None:
    """Set, rearm and cancel timers; cancels of one call come before its other changes.

    Raises:
        TimerConflict: A set of a key that is armed with other content, fired or cancelled; names the key.
            Nothing was written.
    """
    if not changes:
        return
    places = sorted({(change.stream, change.key) for change in changes})
    for _ in range(_TRIES):
        found = _locked(conn, places)
        changed = _decided(changes, found, now)
        if _inserted(conn, [row for place, row in changed.items() if place not in found]):
            _update(conn, [row for place, row in changed.items() if place in found])
            return
    raise TimerConflict("It is set and removed by others all the time.", key=places[0][1])


def _locked(conn: Connection, places: Sequence[_Place]) -> dict[_Place, TimerRow]:
    keys = _keys(places)
    _LOCK(conn, keys=keys, size=len(places)).all()
    found = _FIND(conn, keys=keys, size=len(places)).into(TimerRow)
    return {(row.stream, row.key): row for row in found}


def _inserted(conn: Connection, rows: list[TimerRow]) -> bool:
    """Whether all were new; otherwise another transaction made one meanwhile, and nothing was inserted."""
    if not rows:
        return True
    made = [(row.stream, row.key) for row in _INSERT.for_rows(conn, rows)]
    if len(made) < len(rows):
        _UNDO(conn, keys=_keys(made), size=len(made))
    return len(made) == len(rows)


def _update(conn: Connection, rows: list[TimerRow]) -> None:
    if rows:
        _UPDATE(conn, timers=as_json(rows), size=len(rows))


def _decided(changes: Sequence[TimerChange], found: dict[_Place, TimerRow], now: int) -> dict[_Place, TimerRow]:
    state = dict(found)
    for change in sorted(changes, key=lambda change: change.verb != "cancel"):
        row = _changed(state.get((change.stream, change.key)), change, now)
        if row is not None:
            state[change.stream, change.key] = row
    return {place: row for place, row in state.items() if found.get(place) is not row}


def _changed(row: TimerRow | None, change: TimerChange, now: int) -> TimerRow | None:
    """The timer after a change; None when there is none and none is made."""
    if change.verb == "cancel":
        if row is None or row.status != TimerStatus.ARMED:
            return row
        return msgspec.structs.replace(row, status=TimerStatus.CANCELLED, updated_at=now)
    if change.verb == "rearm" or row is None:
        return _armed(change, 0 if row is None else row.generation + 1, now)
    if row.status != TimerStatus.ARMED:
        raise TimerConflict(f"{change.key!r} is {row.status}.", key=change.key)
    if row.spec != change.spec or not same_content(row.kind, row.data, TIMER_FIRED_NAME, change.data):
        raise TimerConflict(f"{change.key!r} is armed with other content.", key=change.key)
    return row


def _armed(change: TimerChange, generation: int, now: int) -> TimerRow:
    return TimerRow(
        stream=change.stream,
        key=change.key,
        status=TimerStatus.ARMED,
        fire_at=change.fire_at,
        data=change.data,
        spec=change.spec,
        generation=generation,
        updated_at=now,
    )


def disarmed(conn: Connection, streams: Sequence[str]) -> list[TimerChange]:
    """The changes that cancel what is armed in these streams; for `apply`, together with what else it is given.

    One that others are about to arm is not seen: in a deleted stream it is dropped when it fires.
    """
    found = _ARMED_IN(conn, streams=as_json(streams)) if streams else ()
    return [TimerChange(verb="cancel", stream=row.stream, key=row.key) for row in found]


def fire(conn: Connection, *, limit: int, now: int) -> FiredTimers:
    """Publish the events of at most `limit` due timers, the longest due first, and mark them fired.

    Never early. A timer whose event the inbox refuses is cancelled with an alert, so that it neither comes
    back for ever nor holds up its neighbours.
    """
    due = _DUE(conn, limit=limit, now=now).into(TimerRow)
    if not due:
        return FiredTimers(0, 0)
    failpoint("timers.due")
    refused = _publish(conn, due, now)
    failpoint("timers.published")
    _update(conn, [_ended(row, (row.stream, row.key) in refused, now) for row in due])
    alerts.raise_alerts(conn, _alerts_of(refused), now=now)
    failpoint("timers.marked")
    return FiredTimers(len(due) - len(refused), now - min(row.fire_at for row in due), len(refused))


def _publish(conn: Connection, due: list[TimerRow], now: int) -> set[_Place]:
    """Publish what the inbox takes; the places of what it refuses are returned."""
    streams = as_json(sorted({row.stream for row in due}))
    deleted = set(_DELETED(conn, streams=streams).scalars())
    refused = {(row.stream, row.key) for row in due if row.stream in deleted}
    while True:
        events = {(row.stream, row.key): _event(row) for row in due if (row.stream, row.key) not in refused}
        try:
            inbox.publish(conn, list(events.values()), now=now)  # a refusal leaves none of them
        except StreamDeleted as error:
            refused |= {place for place in events if place[0] == error.stream}
        except KeyConflict as error:
            refused |= {place for place, event in events.items() if event.event_id == error.key}
        else:
            return refused


def _ended(row: TimerRow, refused: bool, now: int) -> TimerRow:
    status = TimerStatus.CANCELLED if refused else TimerStatus.FIRED
    return msgspec.structs.replace(row, status=status, updated_at=now)


def _event(row: TimerRow) -> NewEvent:
    return NewEvent(
        stream=row.stream,
        event_id=timer_event_id(row.key, row.generation),
        kind=TIMER_FIRED_NAME,
        data=row.data,
    )


def _alerts_of(refused: Iterable[_Place]) -> list[NewAlert]:
    """One alert per stream: a deleted one may have had many timers."""
    return [
        NewAlert(
            severity="warning",
            code="timer.refused",
            subject=stream,
            detail=f"{count} due timers were cancelled: the stream was deleted or the event's id is taken",
        )
        for stream, count in sorted(Counter(stream for stream, _ in refused).items())
    ]


def next_due(conn: Connection) -> int | None:
    """When the next armed timer is due; None when there is none."""
    fire_at: int | None = _NEXT(conn).scalar_one_or_none()
    return fire_at


def list_(conn: Connection, *, stream: str | None = None, limit: int = 50) -> list[TimerRow]:
    """A stream's timers by key, or the armed ones of all streams by time."""
    found = _ARMED(conn, limit=limit) if stream is None else _OF_STREAM(conn, stream=stream, limit=limit)
    return found.into(TimerRow)


def _keys(places: Iterable[_Place]) -> str:
    return as_json([{"stream": stream, "key": key} for stream, key in places])
