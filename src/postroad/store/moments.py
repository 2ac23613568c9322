"""When something is due next: for tests that step through time, and for those who ask how much still waits."""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.store.statements import Statement, as_json

_NEXT = Statement("""
    SELECT min(at) FROM (
        SELECT min(fire_at) AS at FROM {p}timers WHERE status = 'armed' AND fire_at > :after
        UNION ALL
        SELECT min(due_at) FROM {p}outbox
        WHERE status IN ('pending', 'delivering') AND due_at > :after AND kind IN (SELECT value FROM {list:kinds})
        UNION ALL
        SELECT min(until) FROM {p}gates WHERE until > :after AND kind IN (SELECT value FROM {list:kinds2})
        UNION ALL
        SELECT min(next_at) FROM {p}rates WHERE next_at > :after AND kind IN (SELECT value FROM {list:kinds3})
        UNION ALL
        SELECT min(expires_at) FROM {p}outbox
        WHERE status IN ('pending', 'delivering') AND expires_at > :after
        UNION ALL
        SELECT min(deadline_at) FROM {p}delegations WHERE status = 'open' AND deadline_at > :after
        UNION ALL
        SELECT min(until) FROM {p}queues WHERE until > :after AND type IN (SELECT value FROM {list:types})
        UNION ALL
        SELECT min(ready_at) FROM {p}inbox
        WHERE front = 1 AND reason IS NULL AND ready_at > :after AND type IN (SELECT value FROM {list:types2})
    ) AS moments
""")

_WAITING = Statement("""
    SELECT (SELECT count(*) FROM {p}timers WHERE status = 'armed')
         + (SELECT count(*) FROM {p}outbox WHERE status IN ('pending', 'delivering') AND due_at IS NOT NULL)
         + (SELECT count(*) FROM {p}inbox WHERE reason IS NULL)
         + (SELECT count(*) FROM {p}delegations WHERE status = 'open')
""")

_WAITING_EVENTS = Statement("SELECT count(*) FROM {p}inbox WHERE reason IS NULL")


def next_moment(conn: Connection, *, kinds: Sequence[str], types: Sequence[str], after: int) -> int | None:
    """The earliest time later than `after` at which a timer, delegation, dispatch of these kinds or stream is due.

    Or may be tried again, where a gate or a rate holds back what is due.
    """
    sends, streams = as_json(list(kinds)), as_json(list(types))
    listed = {"kinds": sends, "kinds2": sends, "kinds3": sends, "types": streams, "types2": streams}
    found = _NEXT(conn, **listed, after=after).scalar_one()
    return None if found is None else int(found)


def waiting(conn: Connection) -> int:
    """How many timers, dispatches, events and delegations are not at their end."""
    return int(_WAITING(conn).scalar_one())


def waiting_events(conn: Connection) -> int:
    """How many events wait for a turn."""
    return int(_WAITING_EVENTS(conn).scalar_one())
