"""Retention: what has ended and is older than it is kept goes, a few rows at a time, and keys stay taken.

A pass walks over each table from its oldest row on. It goes on behind the last row that it looked at, so that rows
which must stay, and what the deleted ones leave behind in an index, are walked over once in a pass. `look` only reads;
`end` looks again at what it found, under locks, and skips what others have locked: two passes at once do no harm.

Never touched: what is in flight or waits; the log; what people did (audit); the timers of a stream, fired or not: the
number of their generation tells their events apart. What a deleted stream contained goes whatever it is (`contents`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from postroad.model.failpoints import failpoint
from postroad.model.payload import content_hash
from postroad.model.retention import Retention
from postroad.store import audit, contents, dialects, moves, purging, tombstones
from postroad.store.statements import Statement, as_json
from postroad.store.tombstones import Tombstone

CHUNK = 500
EVENTS = 50  # their payloads are read, so that their hashes are kept
BY = audit.Operator(actor="retention", reason="older than it is kept")


class Place(msgspec.Struct, frozen=True):
    """How far a pass has come: the stage, and the last of its rows that was looked at."""

    stage: int = 0
    at: int = -1
    name: str = ""


class Row(NamedTuple):
    """A row that is to go, or a stream of which something is, by what its table is walked along."""

    at: int
    name: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found at a place, and where to look next; None: the pass is over. `most`: rows of a step."""

    place: Place
    rows: Sequence[Row]
    next: Place | None
    most: int = CHUNK


class Tally(msgspec.Struct, frozen=True):
    """How many rows of what a pass has deleted, and the row of the audit that says so."""

    counts: Mapping[str, int] = {}
    audit: int | None = None


class _Limits(NamedTuple):
    """What is kept, seen from now."""

    retention: Retention
    now: int
    most: int

    def times(self) -> dict[str, int]:
        """The parameters of all statements: what ended before these times may go."""
        kept = msgspec.structs.asdict(self.retention)
        return {name: self.now - length for name, length in kept.items() if name != "history"}


class _Stage(NamedTuple):
    """A table, or what depends on it.

    `look` finds rows (at, name, since, over) behind a place, in order; those `since` later than what is `kept` are
    not over, nor is any behind them. `end` deletes those that are still over. `most`: rows of a look.
    """

    kept: Callable[[Retention], int]
    look: Statement
    end: Callable[[Connection, Sequence[Row], _Limits], Mapping[str, int]]
    most: int = CHUNK
    piecemeal: bool = False  # a row may stand for more than may be deleted at once


# A dead letter that holds up its lane waits for a person: it is a member of it still.
_FINISHED = """(
    (
    (o.status = 'delivered' AND o.updated_at < :delivered) OR (o.status = 'acked' AND o.updated_at < :acked)
    OR (o.status = 'dead_letter' AND o.updated_at < :dead_letter)
    OR (o.status = 'expired' AND o.updated_at < :expired)
    ) AND (o.lane IS NULL OR (SELECT m.number FROM {p}lane_members AS m WHERE m.dispatch = o.id) IS NULL)
)"""
_DISPATCHES = Statement(
    "SELECT o.created_at AS at, o.id AS name, o.created_at AS since, " + _FINISHED + " AS over FROM {p}outbox AS o "
    "WHERE o.created_at >= :at AND (o.created_at > :at OR o.id > :name) ORDER BY o.created_at, o.id LIMIT :limit"
)
_LOCK_DISPATCHES = Statement(
    "SELECT " + moves.COLUMNS + " FROM {p}outbox AS o WHERE o.id {in_list:names} AND " + _FINISHED + " {skip_locked}"
)
# `ready_at` of a dead event is the time at which it died.
_EVENTS = Statement("""
SELECT i.position AS at, '' AS name, i.received_at AS since, i.ready_at < :dead_letter AS over FROM {p}inbox AS i
WHERE i.position > :at AND i.reason IS NOT NULL ORDER BY i.position LIMIT :limit
""")
_LOCK_EVENTS = Statement("""
SELECT i.position, i.stream, i.event_id, i.kind, i.data FROM {p}inbox AS i
WHERE i.position {in_ints:places} AND i.reason IS NOT NULL AND i.ready_at < :dead_letter {skip_locked}
""")
_DELETE_EVENTS = Statement("DELETE FROM {p}inbox WHERE position {in_ints:places}")
# One without an end belongs to a claim that nobody has taken over yet.
_RUNS = Statement("""
SELECT r.started_at AS at, r.run_id AS name, r.started_at AS since,
    r.ended_at IS NOT NULL AND r.ended_at < :records AS over
FROM {p}runs AS r
WHERE r.started_at >= :at AND (r.started_at > :at OR r.run_id > :name) ORDER BY r.started_at, r.run_id LIMIT :limit
""")
_DELETE_RUNS = Statement("DELETE FROM {p}runs WHERE run_id {in_list:names} AND ended_at < :records")
# A set that is to be tried again stands in `picked`: what an earlier run of it did decides how.
_OPERATION_OVER = """coalesce(o.ended_at, o.started_at) < :records
    AND (SELECT q.picked FROM {p}queues AS q WHERE q.stream = o.stream) IS NULL"""
_OPERATIONS = Statement(
    "SELECT o.started_at AS at, o.turn_id || ':' || o.ordinal AS name, o.started_at AS since, "
    + _OPERATION_OVER
    + """ AS over
FROM {p}operations AS o
WHERE o.started_at >= :at AND (o.started_at > :at OR o.turn_id || ':' || o.ordinal > :name)
ORDER BY o.started_at, o.turn_id || ':' || o.ordinal LIMIT :limit"""
)
_DELETE_OPERATIONS = Statement(
    "DELETE FROM {p}operations AS o WHERE (o.turn_id, o.ordinal) IN "
    "(SELECT turn_id, ordinal FROM {rows:keys(turn_id text, ordinal int)} LIMIT :size) AND " + _OPERATION_OVER
)
_ALERTS = Statement("""
SELECT a.id AS at, '' AS name, a.raised_at AS since, a.rung_at IS NOT NULL AS over FROM {p}alerts AS a
WHERE a.id > :at ORDER BY a.id LIMIT :limit
""")
_DELETE_ALERTS = Statement("DELETE FROM {p}alerts WHERE id {in_ints:places} AND rung_at IS NOT NULL")
_HISTORY = Statement("""
SELECT t.id AS at, t.entity AS name, t.at AS since,
    (SELECT o.id FROM {p}outbox AS o WHERE o.id = t.entity) IS NULL AS over
FROM {p}transitions AS t WHERE t.id > :at ORDER BY t.id LIMIT :limit
""")
_DELETE_HISTORY = Statement("DELETE FROM {p}transitions WHERE entity {in_list:names} AND id {in_ints:places}")
_TOMBSTONES = Statement("""
SELECT t.ended_at AS at, t.key AS name, t.ended_at AS since, 1 AS over FROM {p}tombstones AS t
WHERE t.stream = '' AND t.ended_at >= :at AND (t.ended_at > :at OR t.key > :name)
ORDER BY t.ended_at, t.key LIMIT :limit
""")
# By its key: the planner is not offered the index of all that is old.
_DELETE_TOMBSTONES = Statement("""
DELETE FROM {p}tombstones
WHERE scope = '' AND key {in_list:names} AND coalesce(stream, '-') = '' AND coalesce(ended_at, 0) < :tombstones
""")
_BEHIND = """
FROM {p}streams AS s
WHERE s.deleted_at IS NOT NULL AND s.deleted_at >= :at AND (s.deleted_at > :at OR s.id > :name)
ORDER BY s.deleted_at, s.id LIMIT :limit
"""
_CONTENTS = Statement(
    "SELECT s.deleted_at AS at, s.id AS name, s.deleted_at AS since, " + contents.LEFT + " AS over" + _BEHIND
)
_STREAMS = Statement(
    "SELECT s.deleted_at AS at, s.id AS name, s.deleted_at AS since, "
    "(SELECT t.key FROM {p}tombstones AS t WHERE t.stream = s.id AND t.stream <> '' LIMIT 1) IS NOT NULL AS over"
    + _BEHIND
)
_DELETE_TOMBSTONES_OF = Statement("""
DELETE FROM {p}tombstones WHERE (scope, key) IN
    (SELECT t.scope, t.key FROM {p}tombstones AS t WHERE t.stream {in_list:names} AND t.stream <> '' LIMIT :limit)
""")


def look(conn: Connection, place: Place, *, retention: Retention, limit: int = CHUNK, now: int) -> Found:
    """What is to go among the next rows behind a place, at most `limit` of them. It only reads."""
    dialects.distrust_statistics(conn)
    stage = _STAGES[place.stage]
    most = min(limit, stage.most)
    times = _Limits(retention, now, most).times()
    found = stage.look(conn, at=place.at, name=place.name, limit=most, **times).all()
    old = [row for row in found if row.since < now - stage.kept(retention)]
    following: Place | None = Place(place.stage + 1)
    if len(old) == most:
        following = Place(place.stage, old[-1].at, old[-1].name)
    elif place.stage + 1 == len(_STAGES):
        following = None
    return Found(place=place, rows=[Row(row.at, row.name) for row in old if row.over], next=following, most=most)


def end(conn: Connection, found: Found, tally: Tally, *, retention: Retention, now: int) -> tuple[Place | None, Tally]:
    """Delete what a look has found, unless it has changed since; where to look next, and the tally with it.

    The audit's row of the pass is written in the same transaction. No lock is waited for longer than a moment.
    """
    dialects.distrust_statistics(conn)
    dialects.bound_lock_waits(conn, milliseconds=dialects.LOCK_WAIT_MILLISECONDS)
    stage = _STAGES[found.place.stage]
    ended = stage.end(conn, found.rows, _Limits(retention, now, found.most))
    counts = {name: count for name, count in ended.items() if count}
    failpoint("retention.ended")
    left = stage.piecemeal and sum(counts.values()) >= found.most
    return found.place if left else found.next, _tallied(conn, tally, counts, now=now)


def _tallied(conn: Connection, tally: Tally, counts: Mapping[str, int], *, now: int) -> Tally:
    if not counts:
        return tally
    total = dict(Counter(tally.counts) + Counter(counts))
    if tally.audit is not None:
        audit.amend(conn, tally.audit, after=total)
        return Tally(total, tally.audit)
    return Tally(total, audit.record(conn, "retention", "retention", by=BY, before={}, after=total, now=now))


def _end_dispatches(conn: Connection, rows: Sequence[Row], limits: _Limits) -> Mapping[str, int]:
    locked = _LOCK_DISPATCHES(conn, names=_names(rows), **limits.times()).into(moves.Standing)
    # No lane was locked before them, and none is touched: they are members of none any more.
    alone = [msgspec.structs.replace(row, lane=None) for row in locked]
    purging.purge(conn, alone, history=not limits.retention.history, now=limits.now)
    return Counter(str(row.status) for row in locked)


def _end_events(conn: Connection, rows: Sequence[Row], limits: _Limits) -> Mapping[str, int]:
    locked = _LOCK_EVENTS(conn, places=_places(rows), **limits.times()).all()
    made = [
        Tombstone(
            scope=row.stream,
            key=row.event_id,
            id=row.event_id,
            stream=row.stream,
            content_hash=content_hash(row.kind, row.data),
        )
        for row in locked
    ]
    tombstones.bury(conn, made, now=limits.now)
    _DELETE_EVENTS(conn, places=as_json([row.position for row in locked]))
    return {"events": len(locked)}


def _end_operations(conn: Connection, rows: Sequence[Row], limits: _Limits) -> Mapping[str, int]:
    names = (row.name.rpartition(":") for row in rows)
    keys = as_json([{"turn_id": turn_id, "ordinal": int(ordinal)} for turn_id, _, ordinal in names])
    ended = _DELETE_OPERATIONS(conn, keys=keys, size=len(rows), **limits.times())
    return {"operations": ended.rowcount}


def _end_contents(conn: Connection, rows: Sequence[Row], limits: _Limits) -> Mapping[str, int]:
    before = limits.times()["deleted"]
    return contents.end(conn, [row.name for row in rows], before=before, most=limits.most, now=limits.now)


def _end_streams(conn: Connection, rows: Sequence[Row], limits: _Limits) -> Mapping[str, int]:
    return {"tombstones": _DELETE_TOMBSTONES_OF(conn, names=_names(rows), limit=limits.most).rowcount}


def _deleting(name: str, statement: Statement) -> Callable[[Connection, Sequence[Row], _Limits], Mapping[str, int]]:
    """Delete the rows by one statement."""

    def delete(conn: Connection, rows: Sequence[Row], limits: _Limits) -> Mapping[str, int]:
        found = statement(conn, places=_places(rows), names=_names(rows), **limits.times())
        return {name: found.rowcount}

    return delete


def _places(rows: Sequence[Row]) -> str:
    return as_json([row.at for row in rows])


def _names(rows: Sequence[Row]) -> str:
    return as_json([row.name for row in rows])


def _of_dispatches(kept: Retention) -> int:
    return min(kept.delivered, kept.acked, kept.dead_letter, kept.expired)


_STAGES = (
    _Stage(_of_dispatches, _DISPATCHES, _end_dispatches),
    _Stage(lambda kept: kept.dead_letter, _EVENTS, _end_events, most=EVENTS),
    _Stage(lambda kept: kept.records, _RUNS, _deleting("runs", _DELETE_RUNS)),
    _Stage(lambda kept: kept.records, _OPERATIONS, _end_operations),
    _Stage(lambda kept: kept.records, _ALERTS, _deleting("alerts", _DELETE_ALERTS)),
    _Stage(lambda kept: kept.tombstones, _HISTORY, _deleting("history", _DELETE_HISTORY)),
    _Stage(lambda kept: kept.tombstones, _TOMBSTONES, _deleting("tombstones", _DELETE_TOMBSTONES)),
    _Stage(lambda kept: kept.deleted, _CONTENTS, _end_contents, piecemeal=True),
    _Stage(lambda kept: kept.tombstones, _STREAMS, _end_streams, piecemeal=True),
)
