"""When anything is due: what a loop asks before it opens a transaction that writes.

Most looks find nothing. On SQLite a transaction that writes takes the one write lock from whoever has something to
write; on Postgres looking costs one statement instead of several. A look may name a time at which a claim then
finds nothing; before that time there is nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from postroad.store import dialects
from postroad.store.statements import Statement, as_json

# Scalar subqueries along the indexes: an aggregate or EXISTS may be planned as a walk over all of it. There are few
# stops at any time, and their type is compared as what no index is offered for.
_STREAMS = Statement("""
    SELECT value AS type, (SELECT q.until FROM {p}queues AS q
            WHERE q.type = value AND q.until IS NOT NULL ORDER BY q.until LIMIT 1) AS known,
    (SELECT i.ready_at FROM {p}inbox AS i
     WHERE i.type = value AND i.front = 1 AND i.reason IS NULL ORDER BY i.ready_at, i.position LIMIT 1) AS fresh,
    coalesce((SELECT 1 FROM {p}inbox AS i
     WHERE i.kind = 'postroad.stop' AND i.reason IS NULL AND coalesce(i.type, '-') = value LIMIT 1),
     (SELECT 1 FROM {p}queues AS q WHERE q.until IS NULL AND coalesce(q.type, '-') = value
      AND (SELECT s.deleted_at FROM {p}streams AS s WHERE s.id = q.stream) IS NOT NULL LIMIT 1)) AS stopped
    FROM {list:types}
""")
_SENDS = Statement("""
    SELECT (SELECT o.due_at FROM {p}outbox AS o
            WHERE o.kind = value AND o.status IN ('pending', 'delivering') AND o.due_at IS NOT NULL
            ORDER BY o.due_at LIMIT 1) AS head,
    (SELECT 0 FROM {p}lane_members AS m WHERE m.kind = value AND m.fresh = 1 LIMIT 1) AS unseen,
    (SELECT g.until FROM {p}gates AS g WHERE g.kind = value AND g.host = '') AS gate
    FROM {list:kinds}
""")
_MOMENTS = Statement("""
    SELECT (SELECT fire_at FROM {p}timers WHERE status = 'armed' ORDER BY fire_at LIMIT 1) AS timer,
    (SELECT expires_at FROM {p}outbox
     WHERE expires_at IS NOT NULL AND status IN ('pending', 'delivering') ORDER BY expires_at LIMIT 1) AS expiry,
    (SELECT raised_at FROM {p}alerts WHERE rung_at IS NULL ORDER BY id LIMIT 1) AS alert,
    (SELECT deadline_at FROM {p}delegations WHERE status = 'open' ORDER BY deadline_at LIMIT 1) AS deadline
""")


class DueStreams(NamedTuple):
    """When a stream of a type may have a turn to run, None: none is to come; whether people have ended any meanwhile.

    That is, whether there are streams that were stopped, or deleted while they were parked.
    """

    at: int | None
    stopped: bool


def streams(conn: Connection, types: Sequence[str]) -> dict[str, DueStreams]:
    """What is to come in streams of these types, by type."""
    dialects.distrust_statistics(conn)
    return {
        row.type: DueStreams(
            min((at for at in (row.known, row.fresh) if at is not None), default=None), row.stopped is not None
        )
        for row in _STREAMS(conn, types=as_json(types))
    }


def sends(conn: Connection, kinds: Sequence[str]) -> int | None:
    """The earliest time at which a dispatch of one of these kinds may be sent or taken over; None: none is to come.

    At once (0) if some have joined lanes that no dispatcher has seen. Not before the gate of their kind is tried again.
    """
    dialects.distrust_statistics(conn)
    rows = _SENDS(conn, kinds=as_json(kinds)).all()
    heads = [max(row.head, row.gate or 0) for row in rows if row.head is not None]
    return min(heads + [row.unseen for row in rows if row.unseen is not None], default=None)


def moments(conn: Connection) -> int | None:
    """The earliest time at which a timer is due, a dispatch expires, a delegation times out or an alert has waited.

    None: none is to come.
    """
    dialects.distrust_statistics(conn)
    return min((at for row in _MOMENTS(conn) for at in row if at is not None), default=None)
