"""Delegations: one row for each, beside the event that starts it and the report that tells its end.

A row is written with the event, by the commit of the turn that delegates. It ends under its lock, once: whoever comes
first writes the status and publishes the report in one transaction; who comes later leaves a note. Rows are locked by
stream and key, after whatever else a transaction locks and before it publishes reports; who need not wait for them (the
pump) skips those that are locked.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids, reports
from postroad.model.clock import moment
from postroad.model.delegations import (
    TURN_KIND,
    Cancellation,
    Delegated,
    Delegation,
    DelegationEnd,
    DelegationStatus,
    NewDelegation,
    Standing,
)
from postroad.model.errors import KeyConflict, StreamDeleted
from postroad.model.failpoints import failpoint
from postroad.model.rows import NewEvent, Published, TurnCommit
from postroad.store import audit, dialects, inbox, stopping
from postroad.store import reports as report_store
from postroad.store.audit import Operator
from postroad.store.statements import Row, Statement, as_json

DELETED = "its stream was deleted"
STOPPED = "its stream was stopped"
CANCELLED = "it was cancelled"
OUT_OF_TIME = "it was not finished in time"
DROPPED = "its report was dropped: the stream that wanted it was deleted"
_CURE = "another task needs another key."
_LAST_POSITION = 2**63 - 1

_INSERT = Statement(
    "INSERT INTO {p}delegations (stream, key, child, position, depth, status, created_at, deadline_at) "
    "SELECT stream, key, child, position, depth, 'open', :now, deadline_at FROM "
    "{rows:made(stream text, key text, child text, position int, depth int, deadline_at int)} "
    "WHERE true ORDER BY stream, key ON CONFLICT (stream, key) DO NOTHING RETURNING stream, key"
)
# Each as one index has it and no other: a planner that takes all of it for little would walk any that offers itself.
_OPEN_HERE = "d.stream = :stream AND d.status = (SELECT 'open')"
_OPEN_THERE = "d.child = :child AND d.ended_at IS NULL"
_ROW = "d.stream, d.key, d.child, d.position, d.status FROM {p}delegations AS d WHERE "
_LOCK = Statement(
    "SELECT " + _ROW + "(d.stream, d.key) IN (SELECT stream, key FROM {rows:keys(stream text, key text)} LIMIT :size) "
    "ORDER BY d.stream, d.key {for_update}"
)
_OF_CHILDREN = Statement("SELECT " + _ROW + "d.child {in_list:children} AND d.ended_at IS NULL")
_LOCK_DUE = Statement(
    "SELECT " + _ROW + "d.status = 'open' AND d.deadline_at <= :now ORDER BY d.deadline_at LIMIT :limit {skip_locked}"
)
_END = Statement("""
    UPDATE {p}delegations AS d SET status = ends.status, error = ends.error, ended_at = :now
    FROM (SELECT * FROM {rows:ends(stream text, key text, status text, error text)} LIMIT :size) AS ends
    WHERE d.stream = ends.stream AND d.key = ends.key
""")
_NOTE = Statement("""
    UPDATE {p}delegations AS d SET note = notes.note
    FROM (SELECT * FROM {rows:notes(stream text, key text, note text)} LIMIT :size) AS notes
    WHERE d.stream = notes.stream AND d.key = notes.key
""")
_STANDING = Statement(f"""
    SELECT (SELECT count(*) FROM (SELECT 1 FROM {{p}}delegations AS d
            WHERE {_OPEN_HERE} LIMIT :most) AS part) AS open,
    coalesce((SELECT max(d.depth) FROM {{p}}delegations AS d WHERE {_OPEN_THERE}), 0) AS depth
""")
_KNOWN = Statement("SELECT child FROM {p}delegations WHERE stream = :stream AND key = :key")
COLUMNS = "stream, key, child, status, depth, created_at, deadline_at, ended_at, error, note"
_OPEN_OF = Statement(f"SELECT {COLUMNS} FROM {{p}}delegations AS d WHERE {_OPEN_THERE} ORDER BY position LIMIT :limit")
_LAST_OF = Statement(
    f"SELECT {COLUMNS} FROM {{p}}delegations WHERE child = :child AND ended_at IS NOT NULL "
    "ORDER BY ended_at DESC, position DESC LIMIT 1"
)
_OF = Statement(f"SELECT {COLUMNS} FROM {{p}}delegations WHERE stream = :stream ORDER BY key LIMIT :limit")
_OPEN_BY = Statement(f"SELECT {COLUMNS} FROM {{p}}delegations AS d WHERE {_OPEN_HERE} ORDER BY key LIMIT :limit")

_Place = tuple[str, str]


class _Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a delegation that is open and locked."""

    stream: str
    key: str
    child: str
    status: DelegationStatus
    result: str = "null"
    error: str | None = None


def commit(conn: Connection, turns: Sequence[TurnCommit], published: Sequence[Published], *, now: int) -> None:
    """What turns have delegated, and what they finish, stop or delete, with the reports of these ends.

    `published` answers to the turns' events, in their order.

    Raises:
        KeyConflict: The key stands for work on another stream.
    """
    if any(turn.delegated for turn in turns):
        events = (event for turn in turns for event in turn.publishes)
        new = {(e.stream, e.event_id): p.position for e, p in zip(events, published, strict=True) if p.created}
        _begin(conn, [one for turn in turns for one in turn.delegated], new, now=now)
    end(conn, [one for turn in turns for one in turn.finished], now=now)
    if stops := _stops(turns):
        _cancel(conn, stops, STOPPED, now=now)
    cancel(conn, [name for turn in turns for name in turn.deletions], now=now)


def _begin(
    conn: Connection, made: Iterable[NewDelegation], new: Mapping[_Place, int | None], *, now: int
) -> None:  # fmt: skip
    """Write the rows of those whose events are new; the others were delegated before, and are what they are."""
    rows = [
        {
            "stream": one.stream,
            "key": one.key,
            "child": one.child,
            "position": new[one.child, one.event_id],
            "depth": one.depth,
            "deadline_at": now + one.timeout,
        }
        for one in made
        if (one.child, one.event_id) in new
    ]
    written = {(row.stream, row.key) for row in _INSERT(conn, made=as_json(rows), now=now)} if rows else set()
    for row in rows:
        if (row["stream"], row["key"]) not in written:
            raise KeyConflict(f"{row['stream']} has delegated {row['key']!r} before: {_CURE}", key=row["key"])


def _stops(turns: Sequence[TurnCommit]) -> dict[str, int]:
    """Where the last stop stands that each of the turns has seen to."""
    return {
        turn.claim.stream: max(event.position for event in turn.consumed if stopping.stops_all(event))
        for turn in turns
        if any(stopping.stops_all(event) for event in turn.consumed)
    }


def end(conn: Connection, ends: Sequence[DelegationEnd], *, now: int) -> None:
    """End delegations and report it to the streams that wanted them. Of one that has ended before the end stands."""
    if not ends:
        return
    said: dict[_Place, DelegationEnd] = {}
    for one in ends:
        said.setdefault((one.stream, one.key), one)
    found = [(row, said[row.stream, row.key]) for row in _locked(conn, said)]
    open_ = [(row, how) for row, how in found if row.status == DelegationStatus.OPEN]
    late = [(row, how) for row, how in found if row.status not in (DelegationStatus.OPEN, how.status)]
    _end(conn, [_ending(row, how.status, how.error, how.result) for row, how in open_], now=now)
    _note(conn, [(row.stream, row.key, f"{how.status} came too late") for row, how in late])


def _locked(conn: Connection, places: Collection[_Place]) -> Sequence[Row]:
    """The rows of these, locked in one order for everybody; only then is it known whether they are open."""
    keys = as_json([{"stream": stream, "key": key} for stream, key in sorted(places)])
    return _LOCK(conn, keys=keys, size=len(places)).all() if places else ()


def cancel(conn: Connection, children: Sequence[str], *, now: int) -> None:
    """End what deleted streams were to do."""
    if children:
        _cancel(conn, dict.fromkeys(children, _LAST_POSITION), DELETED, now=now)


def _cancel(conn: Connection, before: Mapping[str, int], why: str, *, now: int) -> None:
    """End what these streams were asked to do by events in front of the positions given."""
    found = _OF_CHILDREN(conn, children=as_json(sorted(before))).all()
    rows = _locked(conn, {(row.stream, row.key) for row in found if row.position < before[row.child]})
    open_ = [row for row in rows if row.status == DelegationStatus.OPEN]
    _end(conn, [_ending(row, DelegationStatus.CANCELLED, why) for row in open_], now=now)


def cancel_by(conn: Connection, stream: str, key: str, *, by: Operator, now: int) -> Cancellation:
    """End one delegation for an operator, audited, and have the stream that works at it withdraw or stop that work."""
    row = next(iter(_locked(conn, [(stream, key)])), None)
    if row is None:
        return Cancellation(done=False, status="", refused="there is no such delegation")
    if row.status != DelegationStatus.OPEN:
        return Cancellation(done=False, status=row.status, refused=f"it has ended before: {row.status}")
    why = f"{CANCELLED}: {by.reason}" if by.reason else CANCELLED
    _end(conn, [_ending(row, DelegationStatus.CANCELLED, why)], now=now)
    try:
        inbox.publish(conn, [stopping.cancelling(row.child, stream, key)], now=now)
    except StreamDeleted:  # nothing waits there any more
        pass
    before = {"key": key, "stream": row.child, "status": row.status}
    audit.record(
        conn, "delegation.cancel", stream, by=by, before=before, after={"status": DelegationStatus.CANCELLED}, now=now
    )
    dialects.notify_at_commit(conn, frozenset({"turns"}))
    return Cancellation(done=True, status=DelegationStatus.CANCELLED)


def expire(conn: Connection, *, limit: int, now: int) -> int:
    """End at most `limit` delegations whose time is over, the longest overdue first; how many. Never early."""
    dialects.distrust_statistics(conn)
    rows = _LOCK_DUE(conn, limit=limit, now=now).all()
    _end(conn, [_ending(row, DelegationStatus.TIMED_OUT, OUT_OF_TIME) for row in rows], now=now)
    return len(rows)


def _ending(row: Row, status: DelegationStatus, error: str | None, result: str = "null") -> _Ending:
    return _Ending(stream=row.stream, key=row.key, child=row.child, status=status, error=error, result=result)


def _end(conn: Connection, endings: Sequence[_Ending], *, now: int) -> None:
    if not endings:
        return
    rows = [{"stream": e.stream, "key": e.key, "status": e.status, "error": e.error} for e in endings]
    _END(conn, ends=as_json(rows), size=len(rows), now=now)
    failpoint("delegations.ended")
    told = {(e.stream, ids.delegated_id(e.key)): e for e in endings}
    dropped = report_store.tell(conn, [_report(one) for one in endings], now=now)
    _note(conn, [(e.stream, told[e.stream, e.event_id].key, DROPPED) for e in dropped])


def _report(one: _Ending) -> NewEvent:
    said = Delegated(
        key=one.key, stream=one.child, status=one.status, result=msgspec.Raw(one.result.encode()), error=one.error
    )
    key = ids.delegated_id(one.key)
    return reports.event(one.stream, key, as_json(said), source=one.child, turn_kind=TURN_KIND)


def _note(conn: Connection, notes: Sequence[tuple[str, str, str]]) -> None:
    if notes:
        rows = [{"stream": stream, "key": key, "note": note} for stream, key, note in notes]
        _NOTE(conn, notes=as_json(rows), size=len(rows))


def standing(conn: Connection, stream: str, *, most: int) -> Standing:
    """How many delegations of a stream are open, counted up to `most`, and how deep the tasks are that it works at."""
    dialects.distrust_statistics(conn)
    row = _STANDING(conn, stream=stream, child=stream, most=most).one()
    return Standing(row.open, row.depth)


def known(conn: Connection, stream: str, key: str) -> str | None:
    """The stream to which another one has delegated under this key before; None: to none."""
    found: str | None = _KNOWN(conn, stream=stream, key=key).scalar_one_or_none()
    return found


def check_same(conn: Connection, stream: str, key: str, event: NewEvent) -> None:
    """Refuse the event that starts a task under a key of a stream's that stands for something else.

    Raises:
        KeyConflict: It stands for another task, or for one on another stream.
        StreamDeleted: It stands for this one, and the stream that was to do it was deleted.
    """
    child = known(conn, stream, key)
    if child is None:
        return
    if child != event.stream:
        raise KeyConflict(f"{stream} has delegated {key!r} before, to {child}: {_CURE}", key=key)
    if not inbox.is_same(conn, event):
        raise KeyConflict(f"{stream} has delegated another task to {child} as {key!r} before: {_CURE}", key=key)


def open_of(conn: Connection, child: str, *, limit: int) -> list[Delegation]:
    """What a stream is asked to do and has not finished, oldest first."""
    dialects.distrust_statistics(conn)
    return [shown(row) for row in _OPEN_OF(conn, child=child, limit=limit)]


def last_of(conn: Connection, child: str) -> Delegation | None:
    """Of what a stream was asked to do what ended last: what a late word is about; None: nothing has."""
    dialects.distrust_statistics(conn)
    return next((shown(row) for row in _LAST_OF(conn, child=child)), None)


def of(conn: Connection, stream: str, *, open_only: bool = False, limit: int) -> list[Delegation]:
    """What a stream has delegated, by key."""
    dialects.distrust_statistics(conn)
    return [shown(row) for row in (_OPEN_BY if open_only else _OF)(conn, stream=stream, limit=limit)]


def shown(row: Row) -> Delegation:
    """A row as programs see it."""
    return Delegation(
        parent=row.stream,
        key=row.key,
        stream=row.child,
        status=row.status,
        depth=row.depth,
        created_at=moment(row.created_at),
        deadline=moment(row.deadline_at),
        ended_at=None if row.ended_at is None else moment(row.ended_at),
        error=row.error,
        note=row.note or "",
    )
