"""The log: what happened to a stream, dense from 1 and never changed. Only a turn of the stream appends.

The stream's row in `streams` is locked first and its version is the compare-and-set. Everything that would be
refused is found by a predicate before the first write.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.errors import ConcurrencyConflict, DuplicateEntry, InvalidInput, StreamDeleted
from postroad.model.events import Entry
from postroad.model.rows import NewEntry
from postroad.store.statements import Row, Statement, as_json

EventKey = tuple[str, str]

# Where the event `e` stands in the log, or NULL. Whatever else must keep an event from landing twice belongs here:
# publish, claim and append all look through it. (Tombstones are of events that never landed: publish asks for them.)
LANDED = "(SELECT l.seq FROM {p}log l WHERE l.stream = e.stream AND l.entry_id = e.event_id)"

_LANDED = Statement(
    "SELECT stream, event_id, seq FROM (SELECT e.stream AS stream, e.event_id AS event_id, " + LANDED + " AS seq "
    "FROM {rows:e(stream text, event_id text)}) AS found WHERE seq IS NOT NULL"
)
_HEADS = Statement("SELECT id, version, deleted_at FROM {p}streams WHERE id {in_list:streams} ORDER BY id {for_update}")
_BEGIN = Statement(
    "INSERT INTO {p}streams (id, type, version) SELECT heads.name, heads.type, heads.added "
    "FROM {rows:heads(name text, type text, added int)} WHERE true ORDER BY heads.name ON CONFLICT (id) DO NOTHING"
)
_ADVANCE = Statement(
    "UPDATE {p}streams SET version = version + heads.added FROM {rows:heads(name text, expected int, added int)} "
    "WHERE {match:id=heads.name} AND version = heads.expected AND deleted_at IS NULL"
)
_INSERT = Statement(
    "INSERT INTO {p}log "
    "(stream, seq, entry_id, kind, version, data, received_at, recorded_at, run_id, cause) "
    "SELECT new.stream, new.seq, new.entry_id, new.kind, new.version, new.data, new.received_at, :now, new.run_id, "
    "new.cause FROM {rows:new(stream text, seq int, entry_id text, kind text, version int, data text, "
    "received_at int, run_id text, cause text)}"
)
_VERSION = Statement("SELECT version FROM {p}streams WHERE id = :stream")
_COLUMNS = "stream, seq, entry_id, kind, version, data, received_at, recorded_at, cause"
# Places are dense, so that a read names its range: for ORDER BY and LIMIT alone Postgres, whose statistics are never
# those of now, reads all the rest of the stream and sorts it.
_READ = Statement(
    f"SELECT {_COLUMNS} FROM {{p}}log WHERE stream = :stream AND seq > :after AND seq <= :upto ORDER BY seq"
)
_FIND = Statement(
    f"SELECT {_COLUMNS} FROM {{p}}log WHERE stream = :stream AND entry_id {{in_list:entry_ids}} ORDER BY seq"
)


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that one stream's log gets if it stands at `expected_version`."""

    stream: str
    entries: Sequence[NewEntry]
    expected_version: int

    @property
    def version(self) -> int:
        """The version that the stream then has."""
        return self.expected_version + len(self.entries)


def append(conn: Connection, stream: str, entries: Sequence[NewEntry], *, expected_version: int, now: int) -> int:
    """Append to one stream's log and return its new version; a stream without entries has version 0.

    Raises:
        DuplicateEntry: Some of these entries are in the log already.
        ConcurrencyConflict: The stream does not stand at exactly this version.
        StreamDeleted: The stream was deleted.
    """
    one = Append(stream=stream, entries=entries, expected_version=expected_version)
    append_all(conn, [one], now=now)
    return one.version


def append_all(conn: Connection, appends: Sequence[Append], *, now: int) -> None:
    """Append to several streams' logs, each at most once; all or raise as `append` does."""
    for one in appends:
        _check(one)
    begun = _lock_heads(conn, [one.stream for one in appends])
    _refuse_landed(conn, appends)
    for one in appends:
        if begun.get(one.stream, 0) != one.expected_version:
            raise ConcurrencyConflict(f"{one.stream} is not at {one.expected_version}.", stream=one.stream)
    growing = [one for one in appends if one.entries]
    _move_heads(conn, growing, begun)
    if growing:
        _INSERT.for_rows(conn, _rows(growing, now), now=now)


def _check(one: Append) -> None:
    version: object = one.expected_version
    if not isinstance(version, int) or isinstance(version, bool):
        raise InvalidInput(f"expected_version must be an int, got {version!r}.", field="expected_version")
    twice = tuple(name for name, times in Counter(e.entry_id for e in one.entries).items() if times > 1)
    if twice:
        raise DuplicateEntry(", ".join(twice), stream=one.stream, entry_ids=twice)


def _lock_heads(conn: Connection, streams: Sequence[str]) -> dict[str, int]:
    heads = _HEADS(conn, streams=as_json(streams)).all()
    for head in heads:
        if head.deleted_at is not None:
            raise StreamDeleted(head.id, stream=head.id)
    return {head.id: head.version for head in heads}


def _refuse_landed(conn: Connection, appends: Sequence[Append]) -> None:
    found = landed(conn, ((one.stream, entry.entry_id) for one in appends for entry in one.entries))
    if found:
        stream = min(found)[0]
        names = tuple(sorted(name for owner, name in found if owner == stream))
        raise DuplicateEntry(", ".join(names), stream=stream, entry_ids=names)


def _move_heads(conn: Connection, growing: Sequence[Append], begun: dict[str, int]) -> None:
    """Set the new versions. On Postgres another transaction may have begun a stream since we looked."""
    new = [
        {"name": one.stream, "type": ids.stream_type(one.stream), "added": len(one.entries)}
        for one in growing
        if one.stream not in begun
    ]
    old = [
        {"name": one.stream, "expected": one.expected_version, "added": len(one.entries)}
        for one in growing
        if one.stream in begun
    ]
    moved = _BEGIN.for_rows(conn, new).rowcount if new else 0
    moved += _ADVANCE.for_rows(conn, old).rowcount if old else 0
    if moved != len(growing):
        raise ConcurrencyConflict(stream=growing[0].stream if len(growing) == 1 else "")


def _rows(growing: Sequence[Append], now: int) -> list[dict[str, Any]]:
    return [
        {
            "stream": one.stream,
            "seq": seq,
            "entry_id": entry.entry_id,
            "kind": entry.kind,
            "version": entry.version,
            "data": entry.data,
            "received_at": now if entry.received_at is None else entry.received_at,
            "run_id": entry.run_id,
            "cause": entry.cause,
        }
        for one in growing
        for seq, entry in enumerate(one.entries, one.expected_version + 1)
    ]


def landed(conn: Connection, keys: Iterable[EventKey]) -> dict[EventKey, int]:
    """Those of the events, as pairs of stream and id, that are in the log already, with their place there."""
    rows = [{"stream": stream, "event_id": event_id} for stream, event_id in keys]
    if not rows:
        return {}
    return {(row.stream, row.event_id): row.seq for row in _LANDED.for_rows(conn, rows)}


def read(conn: Connection, stream: str, *, after: int = 0, limit: int = 200) -> list[Entry]:
    """The entries after place `after`, oldest first."""
    return [entry(row) for row in _READ(conn, stream=stream, after=after, upto=after + limit)]


def last(conn: Connection, stream: str, *, limit: int = 200) -> list[Entry]:
    """The newest entries, oldest of them first."""
    return read(conn, stream, after=max(0, version(conn, stream) - limit), limit=limit)


def find(conn: Connection, stream: str, entry_ids: Sequence[str]) -> list[Entry]:
    """Those of the entries that are in the stream's log, oldest first."""
    return [entry(row) for row in _FIND(conn, stream=stream, entry_ids=as_json(entry_ids))]


def version(conn: Connection, stream: str) -> int:
    """How many entries the stream's log has."""
    return _VERSION(conn, stream=stream).scalar_one_or_none() or 0


def entry(row: Row) -> Entry:
    """The entry of a row of the log."""
    return Entry(
        stream=row.stream,
        key=row.entry_id,
        kind=row.kind,
        raw=row.data,
        version=row.version,
        received=row.received_at,
        seq=row.seq,
        recorded=row.recorded_at,
        cause=row.cause,
    )
