"""Which streams a claim may take: known ones by their queues row, unknown ones by the inbox's front.

A queues row exists only while a stream is claimed, backs off, is parked or was freed with events left; it is
found through `until`. Streams without a row are found through a window over the oldest front rows. A window
that is full of streams which cannot be taken is clogged: then a bounded walk from stream to stream, from a
cursor that the claimant keeps, finds the others. Neither grows with a stream's depth or with their number.

What is returned is locked: known streams by their row, unknown ones by an advisory lock in its place.
"""

from itertools import pairwise

import msgspec
from sqlalchemy import Connection

from postroad.model.lifecycle import QueueState
from postroad.store import dialects
from postroad.store.statements import Statement, as_json

WINDOWS = 4  # the window and the walk look at this many times the streams that are wanted

_KNOWN = Statement(
    "SELECT stream, claim_token, state, until AS since, attempts, picked, alone FROM {p}queues "
    "WHERE type = :type AND until <= :now AND (:takeover = 1 OR state <> 'claimed') "
    "ORDER BY until LIMIT :wanted {skip_locked}"
)
_WINDOW = Statement(
    "WITH win AS {now_rows} (SELECT stream, ready_at FROM {p}inbox "
    "WHERE type = :type AND front = 1 AND reason IS NULL AND ready_at <= :before "
    "ORDER BY ready_at, position LIMIT :width) "
    "SELECT win.stream, min(win.ready_at) AS since, count(*) AS depth, "
    "(SELECT 1 FROM {p}queues q WHERE q.stream = win.stream) AS held "
    "FROM win GROUP BY win.stream ORDER BY since"
)
_FIRST_AFTER = (
    "(SELECT i.stream FROM {p}inbox i WHERE i.type = :type AND i.stream > %s AND i.reason IS NULL "
    "ORDER BY i.stream LIMIT 1)"
)
_WALK = Statement(
    "WITH RECURSIVE walk(stream, step) AS ("
    f"SELECT {_FIRST_AFTER % ':cursor'}, 1 "
    f"UNION ALL SELECT {_FIRST_AFTER % 'walk.stream'}, walk.step + 1 FROM walk "
    "WHERE walk.stream IS NOT NULL AND walk.step < :width) "
    "SELECT walk.stream, (SELECT i.ready_at FROM {p}inbox i WHERE i.type = :type AND i.stream = walk.stream "
    "AND i.reason IS NULL ORDER BY i.position LIMIT 1) AS since, "
    "(SELECT 1 FROM {p}queues q WHERE q.stream = walk.stream) AS held "
    "FROM walk WHERE walk.stream IS NOT NULL ORDER BY walk.step"
)
_END = (
    "(SELECT i.received_at FROM {p}inbox i WHERE i.type = :type AND i.stream = streams.value "
    "AND i.reason IS NULL ORDER BY i.position %s LIMIT 1)"
)
_AGES = Statement(f"SELECT value AS stream, {_END % 'ASC'} AS oldest, {_END % 'DESC'} AS newest FROM {{list:streams}}")
_DEFER = Statement("UPDATE {p}queues SET until = due FROM {rows:later(name text, due int)} WHERE stream = name")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a claimant looks for. A stream whose events keep coming is left until it was quiet for `debounce`
    or its oldest event has waited for `debounce_max`."""

    stream_type: str
    limit: int
    cursor: str
    debounce: int
    debounce_max: int
    takeover: bool

    @property
    def longest(self) -> int:
        """How long an event waits for others at the most."""
        return max(self.debounce, self.debounce_max)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that may be taken and is locked; `known` if it has a queues row, whose columns follow."""

    stream: str
    since: int
    known: bool = False
    claim_token: str | None = None
    state: str = QueueState.READY
    attempts: int = 0
    picked: str | None = None
    alone: str | None = None


class Found(msgspec.Struct, frozen=True):
    """The oldest streams that may be taken, if the window was clogged, and where the next walk begins."""

    streams: list[Candidate]
    clogged: bool
    cursor: str


class _Walked(msgspec.Struct, frozen=True):
    """A stretch of streams by name: those that may be taken, and the name that stands before each of them."""

    free: dict[str, int]
    previous: dict[str, str]
    end: str


def search(conn: Connection, ask: Ask, *, now: int) -> Found:
    """Find and lock up to `limit` streams, those that have waited longest."""
    known = _known(conn, ask, now=now)
    window, clogged = _window(conn, ask, now=now)
    walked = _walk(conn, ask, now=now) if clogged else _Walked({}, {}, "")
    free = walked.free | window
    oldest = sorted(free, key=lambda stream: free[stream])
    locked = dialects.try_lock_names(conn, oldest, limit=ask.limit) if oldest else []
    unknown = [Candidate(stream=stream, since=free[stream]) for stream in locked]
    taken = sorted([*known, *unknown], key=lambda candidate: candidate.since)[: ask.limit]
    return Found(taken, clogged, _next_cursor(walked, {one.stream for one in taken}))


def _known(conn: Connection, ask: Ask, *, now: int) -> list[Candidate]:
    rows = _KNOWN(conn, type=ask.stream_type, wanted=ask.limit, takeover=int(ask.takeover), now=now)
    known = [Candidate(known=True, **row) for row in rows.mappings()]
    # A retried set is what it is; a stream that was freed waits for more events like a new one.
    fresh = [one.stream for one in known if one.picked is None and one.state == QueueState.READY]
    later = _too_soon(conn, ask, fresh, now=now)
    if later:
        _DEFER(conn, later=as_json([{"name": name, "due": due} for name, due in sorted(later.items())]))
    return [one for one in known if one.stream not in later]


def _window(conn: Connection, ask: Ask, *, now: int) -> tuple[dict[str, int], bool]:
    width = WINDOWS * ask.limit
    # A stream that may be taken has an event at least that old, quiet or not.
    rows = _WINDOW(conn, type=ask.stream_type, before=now - ask.debounce, width=width).all()
    free = _quiet(conn, ask, {row.stream: row.since for row in rows if row.held is None}, now=now)
    full = sum(row.depth for row in rows) >= width
    return free, full and len(free) < ask.limit


def _walk(conn: Connection, ask: Ask, *, now: int) -> _Walked:
    width = WINDOWS * ask.limit
    rows = _WALK(conn, type=ask.stream_type, cursor=ask.cursor, width=width).all()
    names = [ask.cursor, *(row.stream for row in rows)]
    due = {row.stream: row.since for row in rows if row.held is None and row.since <= now - ask.debounce}
    free = _quiet(conn, ask, due, now=now)
    previous = {name: before for before, name in pairwise(names) if name in free}
    return _Walked(free, previous, names[-1] if len(rows) == width else "")


def _next_cursor(walked: _Walked, taken: set[str]) -> str:
    """In front of the first stream that this walk has found but not taken; '' from the beginning."""
    first = next((name for name in walked.free if name not in taken), None)
    return walked.end if first is None else walked.previous[first]


def _quiet(conn: Connection, ask: Ask, free: dict[str, int], *, now: int) -> dict[str, int]:
    later = _too_soon(conn, ask, list(free), now=now)
    return {stream: since for stream, since in free.items() if stream not in later}


def _too_soon(conn: Connection, ask: Ask, streams: list[str], *, now: int) -> dict[str, int]:
    """Those of the streams that wait for more events, with the time until which they do."""
    if not ask.debounce or not streams:
        return {}
    ages = _AGES(conn, type=ask.stream_type, streams=as_json(streams))
    due = {
        row.stream: min(row.newest + ask.debounce, row.oldest + ask.longest) for row in ages if row.newest is not None
    }
    return {stream: at for stream, at in due.items() if at > now}
