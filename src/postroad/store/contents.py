"""What a deleted stream contained, and how it goes: entries, events, operations, runs, timers, delegations.

The streams' rows stay, so that whatever else comes for them is refused or dropped. An event goes as everywhere under
the stream's queues row, or what stands for it, in a statement after the lock; a stream whose turn somebody is at is
left until that has ended.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from postroad.model.lifecycle import QueueState
from postroad.store import dialects
from postroad.store.statements import Statement, as_json

# Whether anything is left in the stream `s`.
LEFT = " OR ".join(
    f"(SELECT c.stream FROM {{p}}{table} AS c WHERE c.stream = s.id LIMIT 1) IS NOT NULL"
    for table in ("log", "inbox", "operations", "runs", "timers", "delegations", "queues", "partials")
)
_STILL = Statement("SELECT id FROM {p}streams WHERE id {in_list:names} AND coalesce(deleted_at, :before) < :before")
_QUEUES = Statement(
    "SELECT stream, state, until FROM {p}queues WHERE stream {in_list:names} ORDER BY stream {skip_locked}"
)
_HELD = Statement("SELECT stream FROM {p}queues WHERE stream {in_list:names}")
_EMPTY = Statement(
    "DELETE FROM {p}queues AS q WHERE q.stream {in_list:names} "
    "AND (SELECT i.position FROM {p}inbox AS i WHERE i.stream = q.stream LIMIT 1) IS NULL"
)
_PARTIALS = Statement("DELETE FROM {p}partials WHERE stream {in_list:names}")
_EVENTS = Statement("""
DELETE FROM {p}inbox WHERE position IN
    (SELECT i.position FROM {p}inbox AS i WHERE i.stream {in_list:names} LIMIT :most)
""")
# The first ones of one stream: only by its key can they be told. Of several streams a planner that takes each of them
# for short would find a row by the other index, and read the whole stream for it.
_ENTRIES = Statement("""
DELETE FROM {p}log WHERE stream = :stream
    AND seq < :most + (SELECT l.seq FROM {p}log AS l WHERE l.stream = :stream ORDER BY l.seq LIMIT 1)
""")
_OPERATIONS = Statement("""
DELETE FROM {p}operations WHERE (turn_id, ordinal) IN
    (SELECT o.turn_id, o.ordinal FROM {p}operations AS o WHERE o.stream {in_list:names} LIMIT :most)
""")
_RUNS = Statement("""
DELETE FROM {p}runs WHERE run_id IN (SELECT r.run_id FROM {p}runs AS r WHERE r.stream {in_list:names} LIMIT :most)
""")
# What it had delegated: nobody is told of the end any more.
_DELEGATIONS = Statement("""
DELETE FROM {p}delegations WHERE (stream, key) IN
    (SELECT d.stream, d.key FROM {p}delegations AS d WHERE d.stream {in_list:names} LIMIT :most)
""")
# What a pump or a program has locked is left: it may wait for what was deleted here before.
_LOCK_TIMERS = Statement(
    "SELECT t.stream, t.key FROM {p}timers AS t WHERE t.stream {in_list:names} LIMIT :most {skip_locked}"
)
_TIMERS = Statement(
    "DELETE FROM {p}timers WHERE (stream, key) IN "
    "(SELECT stream, key FROM {rows:keys(stream text, key text)} LIMIT :most)"
)

_WHAT = {"events": _EVENTS, "operations": _OPERATIONS, "runs": _RUNS, "delegations": _DELEGATIONS}


def end(conn: Connection, names: Sequence[str], *, before: int, most: int, now: int) -> Mapping[str, int]:
    """Delete at most `most` rows of what these streams contained, of those deleted before that time; how many of what.

    What others have locked is left.
    """
    free = _free(conn, _STILL(conn, names=as_json(names), before=before).scalars(), now=now)
    counts: dict[str, int] = {}
    if not free:
        return counts
    asked = as_json(free)
    for what, statement in _WHAT.items():
        counts[what] = statement(conn, names=asked, most=most - sum(counts.values())).rowcount
    counts["timers"] = _end_timers(conn, asked, most=most - sum(counts.values()))
    counts["entries"] = _end_entries(conn, free, most=most - sum(counts.values()))
    _EMPTY(conn, names=asked)
    _PARTIALS(conn, names=asked)
    return counts


def _free(conn: Connection, names: Sequence[str], *, now: int) -> list[str]:
    """Those of the streams whose turn nobody is at, locked as a claimant locks them."""
    held = {row.stream: row for row in _QUEUES(conn, names=as_json(names))} if names else {}
    others = dialects.try_lock_names(conn, [name for name in names if name not in held], limit=len(names))
    # Some of those have a row after all: it is locked by somebody else, or was made before we had the name.
    unknown = set(others) - set(_HELD(conn, names=as_json(others)).scalars())
    over = {name for name, row in held.items() if row.state != QueueState.CLAIMED or row.until <= now}
    return sorted(unknown | over)


def _end_entries(conn: Connection, names: Sequence[str], *, most: int) -> int:
    ended = 0
    for name in names:
        if ended >= most:
            break
        ended += _ENTRIES(conn, stream=name, most=most - ended).rowcount
    return ended


def _end_timers(conn: Connection, names: str, *, most: int) -> int:
    keys = _LOCK_TIMERS(conn, names=names, most=most).mappings()
    return _TIMERS(conn, keys=as_json(keys), most=len(keys)).rowcount if keys else 0
