"""News of many streams in one look: entries behind a place, and what the running turn says."""

from collections.abc import Iterator, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.events import Entry, Partial
from postroad.store import dialects, log
from postroad.store.statements import Row, Statement, as_json

ENTRIES_MAX = 1_000  # of one look, of all streams together


class Asked(msgspec.Struct, frozen=True):
    """What somebody waits for: entries of a stream with a seq above `after`, or other words than were `heard`.

    `heard` tells one text of one run from every other; '': none was heard. With an `event` it is that event's end, and
    nothing else: its entry, or none if it died, or its stream was deleted.
    """

    stream: str
    after: int = 0
    heard: str = ""
    event: str = ""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What is new for one who asked.

    `entries` are those up to the place `upto`; the stream stands at `version`, and `partial` is what its running
    turn says there.
    """

    entries: Sequence[Entry]
    upto: int
    version: int
    partial: Partial | None
    heard: str
    deleted: bool


# What a run says counts while its claim does, and no longer than its lease: the rest was left by a killed process.
# Scalar subqueries: a join would be planned as a walk over all streams where the planner takes the table for empty.
_NEWS = Statement("""
SELECT ord, name, seq, version, deleted, heard,
    CASE WHEN heard <> '' THEN (SELECT p.turn_id FROM {p}partials AS p WHERE p.stream = found.name) END AS turn,
    CASE WHEN heard <> '' THEN (SELECT p.said FROM {p}partials AS p WHERE p.stream = found.name) END AS words
FROM (
    SELECT asked.ord, asked.name, asked.seq, asked.known,
        coalesce((SELECT s.version FROM {p}streams AS s WHERE s.id = asked.name), 0) AS version,
        (SELECT s.deleted_at FROM {p}streams AS s WHERE s.id = asked.name) IS NOT NULL AS deleted,
        coalesce((
            SELECT p.run_id || '/' || p.updated_at FROM {p}partials AS p WHERE p.stream = asked.name
            AND (SELECT r.claim_token FROM {p}runs AS r WHERE r.run_id = p.run_id)
                = (SELECT q.claim_token FROM {p}queues AS q WHERE q.stream = p.stream AND q.until > :now)
        ), '') AS heard
    FROM {rows:asked(name text, seq int, known text)}
) AS found
WHERE version > seq OR deleted OR heard <> known
ORDER BY ord
""")
_COLUMNS = ("entry_id", "kind", "version", "data", "received_at", "recorded_at", "cause")
_ENTRIES = Statement(
    "SELECT number, stream, seq, "
    + ", ".join(_COLUMNS)
    + " FROM (SELECT at.number, at.stream, at.seq, "
    + ", ".join(
        f"(SELECT l.{name} FROM {{p}}log AS l WHERE l.stream = at.stream AND l.seq = at.seq) AS {name}"
        for name in _COLUMNS
    )
    + " FROM {rows:at(number int, stream text, seq int)}) AS found WHERE entry_id IS NOT NULL ORDER BY number, seq"
)

# An event that is neither in the inbox nor in the log has died, and is purged. Of those that ended the entry is read in
# the same statement: however many wait, and whatever ends, a look costs one.
_ENDED = Statement(
    "SELECT ord, stream, seq, gone, "
    + ", ".join(
        f"(SELECT l.{name} FROM {{p}}log AS l WHERE l.stream = found.stream AND l.seq = found.seq) AS {name}"
        for name in _COLUMNS
    )
    + " FROM (SELECT asked.ord, asked.name AS stream, "
    "(SELECT i.position FROM {p}inbox AS i WHERE i.stream = asked.name AND i.event_id = asked.event "
    "AND i.reason IS NULL) AS waits, "
    "(SELECT l.seq FROM {p}log AS l WHERE l.stream = asked.name AND l.entry_id = asked.event) AS seq, "
    "(SELECT s.deleted_at FROM {p}streams AS s WHERE s.id = asked.name) AS gone "
    "FROM {rows:asked(name text, event text)}) AS found WHERE waits IS NULL OR gone IS NOT NULL ORDER BY ord"
)


def look(conn: Connection, asked: Sequence[Asked], *, now: int, limit: int = ENTRIES_MAX) -> dict[Asked, News]:
    """What is new of what was asked for; of all it is told together, at most `limit` entries, the first ones first."""
    dialects.distrust_statistics(conn)
    ends = [one for one in asked if one.event]
    found = _ends(conn, ends) if ends else {}
    changes = [one for one in asked if not one.event]
    return found | (_changes(conn, changes, now=now, limit=limit) if changes else {})


def _changes(conn: Connection, asked: Sequence[Asked], *, now: int, limit: int) -> dict[Asked, News]:
    rows = [{"name": one.stream, "seq": one.after, "known": one.heard} for one in asked]
    told = list(_shared(_NEWS(conn, asked=as_json(rows), now=now).all(), limit))
    entries = _entries(conn, told)
    return {asked[row.ord]: _news(row, upto, entries.get(row.ord, [])) for row, upto in told}


def _ends(conn: Connection, asked: Sequence[Asked]) -> dict[Asked, News]:
    rows = [{"name": one.stream, "event": one.event} for one in asked]
    return {asked[row.ord]: _end(row) for row in _ENDED(conn, asked=as_json(rows))}


def _end(row: Row) -> News:
    entries = [] if row.seq is None else [log.entry(row)]
    seq = row.seq or 0
    return News(entries=entries, upto=seq, version=seq, partial=None, heard="", deleted=row.gone is not None)


def _shared(found: Sequence[Row], room: int) -> Iterator[tuple[Row, int]]:
    """Up to which place each is told of; those for whose entries no room is left are not told of at all."""
    for row in found:
        new = min(max(0, row.version - row.seq), room)
        if new or row.version <= row.seq:
            yield row, row.seq + new
        room -= new


def _entries(conn: Connection, told: Sequence[tuple[Row, int]]) -> dict[int, list[Entry]]:
    places = [
        {"number": row.ord, "stream": row.name, "seq": seq}
        for row, upto in told
        for seq in range(row.seq + 1, upto + 1)
    ]  # fmt: skip
    found: dict[int, list[Entry]] = {}
    if places:
        for row in _ENTRIES(conn, at=as_json(places)):
            found.setdefault(row.number, []).append(log.entry(row))
    return found


def _news(row: Row, upto: int, entries: Sequence[Entry]) -> News:
    return News(
        entries=entries,
        upto=upto,
        version=row.version,
        partial=Partial(row.name, row.turn, row.words) if row.heard else None,
        heard=row.heard,
        deleted=bool(row.deleted),
    )
