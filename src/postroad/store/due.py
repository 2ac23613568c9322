"""Whether anything is due: what a loop asks before it opens a transaction that writes.

Most looks find nothing. On SQLite a transaction that writes takes the one write lock from whoever has something to
write; on Postgres looking costs one statement instead of several. A look may say yes where a claim then finds
nothing; where it says no, there was nothing.
"""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.store.statements import Statement, as_json

# Scalar subqueries: EXISTS may be planned as a join that reads all of it.
_STREAMS = Statement("""
    SELECT 1 FROM {list:types} WHERE
    (SELECT 1 FROM {p}queues AS q WHERE q.type = value AND q.until <= :now LIMIT 1) IS NOT NULL
    OR (SELECT 1 FROM {p}inbox AS i
        WHERE i.type = value AND i.front = 1 AND i.reason IS NULL AND i.ready_at <= :now LIMIT 1) IS NOT NULL
    LIMIT 1
""")
_SENDS = Statement("""
    SELECT 1 FROM {list:kinds} WHERE
    (SELECT 1 FROM {p}outbox AS o
     WHERE o.kind = value AND o.status IN ('pending', 'delivering') AND o.due_at <= :now LIMIT 1) IS NOT NULL
    LIMIT 1
""")
_MOMENTS = Statement("""
    SELECT (SELECT 1 FROM {p}timers WHERE status = 'armed' AND fire_at <= :now LIMIT 1) AS timers,
    (SELECT 1 FROM {p}outbox
     WHERE expires_at <= :now AND status IN ('pending', 'delivering') AND expires_at IS NOT NULL LIMIT 1) AS expiries,
    (SELECT 1 FROM {p}alerts WHERE rung_at IS NULL LIMIT 1) AS alerts
""")


def streams(conn: Connection, types: Sequence[str], *, now: int) -> bool:
    """Whether a stream of one of these types may have a turn to run."""
    return bool(_STREAMS(conn, types=as_json(types), now=now).all())


def sends(conn: Connection, kinds: Sequence[str], *, now: int) -> bool:
    """Whether a dispatch of one of these kinds may be sent or taken over."""
    return bool(_SENDS(conn, kinds=as_json(kinds), now=now).all())


def moments(conn: Connection, *, now: int) -> bool:
    """Whether a timer is due, a dispatch has expired, or an alert has not rung."""
    (row,) = _MOMENTS(conn, now=now)
    return any(row)
