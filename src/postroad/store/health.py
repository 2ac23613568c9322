"""What `postroad doctor` asks of a database: settings that decide about durability, and work that nobody does.

Every count stops at a bound, as in `status`.
"""

import msgspec
from sqlalchemy import Connection

from postroad.model.lifecycle import Reason
from postroad.store import dialects, status
from postroad.store.statements import Statement, as_json

RECENT_MAX = 1_000


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """The unfinished dispatches of a kind; with `more` there are at least `count`. The age in microseconds."""

    kind: str
    count: int
    more: bool
    oldest_age: int


class SqliteSettings(msgspec.Struct, frozen=True):
    """How this connection writes: the journal's mode, and whether a commit waits for the disk."""

    journal: str
    synchronous: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Unfinished work, and whether anybody does it.

    Attributes:
        overdue: Of the kinds that were asked for, how long the one that is due longest has been due.
        attempted_ago: How long ago the last attempt began; None: none of the last thousand changes was one.
        pump_lag: How long the timer that is due longest has been due.
        asking_for_acks: How many of the first 10,000 that are unfinished ask for an acknowledgement.
    """

    queued: list[Queued]
    overdue: int
    attempted_ago: int | None
    pump_lag: int
    asking_for_acks: int


_NEW_IN_LANES = Statement("""
    WITH RECURSIVE kinds(kind) AS (
        SELECT (SELECT min(kind) FROM {p}lane_members WHERE fresh = 1)
        UNION ALL
        SELECT (SELECT min(m.kind) FROM {p}lane_members AS m WHERE m.fresh = 1 AND m.kind > kinds.kind)
        FROM kinds WHERE kinds.kind IS NOT NULL
    )
    SELECT kind,
        (SELECT count(*) FROM (SELECT 1 FROM {p}lane_members AS m
            WHERE m.fresh = 1 AND m.kind = kinds.kind LIMIT :max + 1) AS part) AS members,
        (SELECT o.created_at FROM {p}lane_members AS m JOIN {p}outbox AS o ON o.id = m.dispatch
            WHERE m.fresh = 1 AND m.kind = kinds.kind ORDER BY m.number LIMIT 1) AS oldest
    FROM kinds WHERE kind IS NOT NULL
""")
_FIRST_DUE = Statement("""
    SELECT (SELECT o.due_at FROM {p}outbox AS o
            WHERE o.kind = value AND o.status IN ('pending', 'delivering') AND o.due_at IS NOT NULL
            ORDER BY o.due_at LIMIT 1) AS due
    FROM {list:kinds}
""")
_LAST_ATTEMPT = Statement("""
    SELECT max(at) FROM (SELECT at, reason_code FROM {p}transitions ORDER BY id DESC LIMIT :max) AS part
    WHERE reason_code = :attempt
""")
_ASKING = Statement("""
    SELECT count(*) FROM (
        SELECT ack_required FROM {p}outbox WHERE status IN ('pending', 'delivering') AND due_at IS NOT NULL
        ORDER BY kind, due_at LIMIT :max
    ) AS part WHERE ack_required = 1
""")


def work(conn: Connection, kinds: list[str], *, now: int) -> Work:
    """What is queued, and whether the work of these kinds is being done."""
    dialects.distrust_statistics(conn)
    found = status.snapshot(conn, now=now)
    due = [row.due for row in _FIRST_DUE(conn, kinds=as_json(kinds)) if row.due is not None]
    attempted = _LAST_ATTEMPT(conn, max=RECENT_MAX, attempt=Reason.ATTEMPT).scalar_one()
    return Work(
        queued=_queued(conn, found, now=now),
        overdue=max(0, now - min(due, default=now)),
        attempted_ago=None if attempted is None else max(0, now - attempted),
        pump_lag=found.pump_lag,
        asking_for_acks=_ASKING(conn, max=status.COUNT_MAX).scalar_one(),
    )


def _queued(conn: Connection, found: status.Snapshot, *, now: int) -> list[Queued]:
    """By kind: those with a due time, and those that have joined lanes which no dispatcher has looked at."""
    queued = {
        kind.kind: Queued(
            kind=kind.kind, count=kind.pending + kind.delivering, more=kind.more, oldest_age=kind.oldest_age
        )
        for kind in found.kinds
    }
    for row in _NEW_IN_LANES(conn, max=status.PER_KIND_MAX):
        known = queued.get(row.kind) or Queued(kind=row.kind, count=0, more=False, oldest_age=0)
        queued[row.kind] = Queued(
            kind=row.kind,
            count=known.count + min(row.members, status.PER_KIND_MAX),
            more=known.more or row.members > status.PER_KIND_MAX,
            oldest_age=max(known.oldest_age, now - (row.oldest or now)),
        )
    return sorted(queued.values(), key=lambda one: one.kind)


def sqlite_settings(conn: Connection) -> SqliteSettings:
    """How this SQLite connection writes."""
    return SqliteSettings(
        conn.exec_driver_sql("PRAGMA journal_mode").scalar_one(),
        conn.exec_driver_sql("PRAGMA synchronous").scalar_one(),
    )
