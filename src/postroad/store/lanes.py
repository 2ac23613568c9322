"""Ordered lanes: of a lane's unfinished dispatches only the first one, its head, has a due time.

An insert touches nothing that others hold: it leaves its members `fresh`. A dispatcher sees them, makes the lanes that
are missing and gives each lane without a head one. Whoever ends a member locks its lane first, and an outbox row never
before its lane; it looks for the next head in a later statement, which sees what was committed meanwhile. What it does
not see is fresh.
"""

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.errors import DatabaseBusy
from postroad.store.statements import Statement, as_json

LOCK_TRIES = 5

_JOIN = Statement("""
INSERT INTO {p}lane_members (lane, dispatch, kind, due_at)
SELECT lane, dispatch, kind, due_at FROM {rows:new(lane text, dispatch text, kind text, due_at int)}
WHERE true ORDER BY ord ON CONFLICT (dispatch) DO NOTHING RETURNING dispatch
""")
_UNSEEN = Statement("""
SELECT (SELECT 1 FROM {p}lane_members AS m WHERE m.kind = value AND m.fresh = 1 LIMIT 1) AS unseen FROM {list:kinds}
""")
_FRESH = Statement("""
SELECT number, lane FROM {p}lane_members WHERE kind = :kind AND fresh = 1 ORDER BY number LIMIT :limit
""")
# In order, so that two that need the same lanes wait for each other in one direction only.
_MAKE = Statement("""
INSERT INTO {p}lanes (lane) SELECT value FROM {list:names} WHERE true ORDER BY value ON CONFLICT (lane) DO NOTHING
""")
_LOCK = Statement("SELECT lane FROM {p}lanes WHERE lane {in_list:names} ORDER BY lane {for_update}")
_TRY_LOCK = Statement("SELECT lane FROM {p}lanes WHERE lane {in_list:names} ORDER BY lane {skip_locked}")
_HEADS = Statement("SELECT lane, head FROM {p}lanes WHERE lane {in_list:names}")
_SEEN = Statement("UPDATE {p}lane_members SET fresh = 0 WHERE number {in_ints:numbers}")
_LEAVE = Statement("DELETE FROM {p}lane_members WHERE dispatch {in_list:ids}")
_NEXT = Statement("""
SELECT value AS lane,
    (SELECT m.dispatch FROM {p}lane_members AS m WHERE m.lane = value ORDER BY m.lane, m.number LIMIT 1) AS head,
    (SELECT m.due_at FROM {p}lane_members AS m WHERE m.lane = value ORDER BY m.lane, m.number LIMIT 1) AS due_at
FROM {list:names}
""")
_CROWN = Statement("""
UPDATE {p}lanes SET head = heads.head FROM {rows:heads(name text, head text)}
WHERE lane = heads.name AND lane {in_list:names}
""")
_DUE = Statement("""
UPDATE {p}outbox SET due_at = heads.at FROM {rows:heads(head text, at int)}
WHERE id = heads.head AND id {in_list:ids} AND status = 'pending' AND due_at IS NULL
""")
_NOT_DUE = Statement("UPDATE {p}outbox SET due_at = NULL WHERE id {in_list:ids}")
_EMPTY = Statement("DELETE FROM {p}lanes WHERE lane {in_list:names}")
_OF = Statement("SELECT DISTINCT lane FROM {p}outbox WHERE id {in_list:ids} AND lane IS NOT NULL")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A dispatch of a lane, and when it is due once it is the lane's head."""

    lane: str
    dispatch: str
    kind: str
    due_at: int


def join(conn: Connection, members: Sequence[Member]) -> set[str]:
    """Put dispatches at their lanes' ends, in the given order; the ids of those that were in none."""
    return set(_JOIN(conn, new=as_json(members)).scalars()) if members else set()


def rejoin(conn: Connection, members: Sequence[Member]) -> None:
    """Of finished dispatches that are to be sent again, put those at their lanes' ends that have left them.

    One that held up its lane as a dead letter is its head still, and due as its row says.
    """
    last = join(conn, members)
    if last:
        _NOT_DUE(conn, ids=as_json(sorted(last)))


def unseen(conn: Connection, kinds: Sequence[str]) -> bool:
    """Whether dispatches of these kinds have joined lanes, and no dispatcher has seen them."""
    return any(_UNSEEN(conn, kinds=as_json(kinds)).scalars())


def promote(conn: Connection, kinds: Sequence[str], *, limit: int, now: int) -> int:
    """See at most `limit` new members of each kind, and give their lanes heads; how many were seen.

    A lane that somebody else holds is left to them, or to the next time.
    """
    fresh = {row.number: row.lane for kind in kinds for row in _FRESH(conn, kind=kind, limit=limit)}
    if not fresh:
        return 0
    held = try_lock(conn, fresh.values())
    seen = [number for number, lane in fresh.items() if lane in held]
    _SEEN(conn, numbers=as_json(seen))
    headless = [row.lane for row in _HEADS(conn, names=as_json(sorted(held))) if row.head is None]
    _advance(conn, headless, now=now)
    return len(seen)


def lock(conn: Connection, names: Iterable[str]) -> None:
    """Lock lanes, and wait for whoever holds them. A lane that has no row gets one, so that there is one to lock."""
    wanted = sorted(set(names))
    for _ in range(LOCK_TRIES):
        if not wanted:
            return
        _MAKE(conn, names=as_json(wanted))
        held = set(_LOCK(conn, names=as_json(wanted)).scalars())
        wanted = [name for name in wanted if name not in held]  # their last members left in between
    if wanted:
        raise DatabaseBusy(f"lane {wanted[0]!r} was made and emptied again and again")


def try_lock(conn: Connection, names: Iterable[str]) -> set[str]:
    """Lock those lanes that nobody holds, without waiting: for who holds outbox rows already."""
    wanted = as_json(sorted(set(names)))
    _MAKE(conn, names=wanted)
    return set(_TRY_LOCK(conn, names=wanted).scalars())


def lock_of(conn: Connection, dispatches: Sequence[str]) -> None:
    """Lock the lanes of these dispatches, if they are in any; before their rows."""
    lock(conn, _OF(conn, ids=as_json(dispatches)).scalars())


def leave(conn: Connection, gone: Sequence[tuple[str, str]], *, now: int) -> None:
    """Take members, (lane, dispatch) each, out of their lanes, which this transaction has locked; the next may go."""
    if not gone:
        return
    ids = {dispatch for _, dispatch in gone}
    names = as_json(sorted({lane for lane, _ in gone}))
    _LEAVE(conn, ids=as_json(sorted(ids)))
    _advance(conn, [row.lane for row in _HEADS(conn, names=names) if row.head is None or row.head in ids], now=now)


def _advance(conn: Connection, names: Sequence[str], *, now: int) -> None:
    """Make each lane's first member its head, due at its time or at once; a lane without members ends."""
    if not names:
        return
    found = _NEXT(conn, names=as_json(names)).all()
    heads = [row for row in found if row.head is not None]
    if heads:
        crowned = [{"name": row.lane, "head": row.head} for row in heads]
        _CROWN(conn, heads=as_json(crowned), names=as_json([row.lane for row in heads]))
        due = [{"head": row.head, "at": max(row.due_at, now)} for row in heads]
        _DUE(conn, heads=as_json(due), ids=as_json([row.head for row in heads]))
    empty = [row.lane for row in found if row.head is None]
    if empty:
        _EMPTY(conn, names=as_json(empty))
