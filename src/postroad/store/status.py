"""How things stand, for `postroad status`, the console and the metrics.

Nothing here walks what is finished: every count is over a partial index of what is unfinished or went wrong,
and stops at a bound. A count that reached its bound says `more`.
"""

from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import SECOND
from postroad.model.lifecycle import Reason, Status
from postroad.store import dialects, queues, stopping, timers, transitions
from postroad.store.statements import Statement

HOUR = 3_600 * SECOND
COUNT_MAX = 10_000
PER_KIND_MAX = 1_000
LISTED_MAX = 10
PARKED_MAX = 100
# How events end of which somebody decided that nobody is to look at them: that is no death.
DROPPED = (queues.STREAM_DELETED, stopping.WITHDRAWN)


class Bounded(msgspec.Struct, frozen=True):
    """A count that stops at a bound; `more`: there are at least this many."""

    count: int
    more: bool = False


class KindStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The unfinished dispatches of a kind; the age is that of the oldest (microseconds).

    With `more` it is counted over the first that are due only.
    """

    kind: str
    pending: int
    delivering: int
    oldest_age: int
    more: bool


class StreamCount(msgspec.Struct, frozen=True):
    """A stream and how often something happened to it."""

    stream: str
    count: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand. Ages and the lag are microseconds, 0 where there is nothing; `lately`: the last hour.

    Attributes:
        events_dead: That no turn could process, among the last 10,000 that ended without one.
        oldest_event_age: Of the event at the inbox's front that has been ready the longest.
        dispatches: Unfinished ones by status; what waits behind the head of a lane is not counted.
        trouble: Dead letters, expiries, lost leases and stale settles lately, by reason.
        runs: Runs that began lately, the newest 10,000 of them.
        conflict_rate: The part of `runs` that ended in a conflict.
        runs_ended: Runs that ended lately other than committed, by how.
        conflicted: The streams with the most conflicts lately.
    """

    now: int
    events_waiting: Bounded
    events_dead: Bounded
    oldest_event_age: int
    dispatches: dict[str, int]
    oldest_dispatch_age: int
    kinds: list[KindStatus]
    trouble: dict[str, int]
    dead_lately: int
    expired_lately: int
    lease_losses_lately: int
    stale_settles_lately: int
    pump_lag: int
    runs: Bounded
    conflict_rate: float
    runs_ended: dict[str, int]
    conflicted: list[StreamCount]
    parked: list[str]
    alerts_unrung: Bounded


_UNFINISHED = "status IN ('pending', 'delivering') AND due_at IS NOT NULL"
_WAITING = Statement("""
    SELECT count(*) FROM (SELECT 1 FROM {p}inbox WHERE reason IS NULL LIMIT :max + 1) AS part
""")
# Bounded by what is looked at, not by what is found: what was dropped stays in the index for as long as the dead do.
_DEAD = Statement(f"""
    SELECT count(*) AS ended, count(CASE WHEN reason NOT IN {DROPPED} THEN 1 END) AS dead FROM (
        SELECT reason FROM {{p}}inbox WHERE reason IS NOT NULL ORDER BY position DESC LIMIT :max + 1
    ) AS part
""")
_UNRUNG = Statement("""
    SELECT count(*) FROM (SELECT 1 FROM {p}alerts WHERE rung_at IS NULL LIMIT :max + 1) AS part
""")
# From one type to the next in the index, then each type's first: as many look-ups as there are types.
_OLDEST_EVENT = Statement("""
    WITH RECURSIVE types(type) AS (
        SELECT (SELECT min(type) FROM {p}inbox WHERE front = 1 AND reason IS NULL)
        UNION ALL
        SELECT (SELECT min(i.type) FROM {p}inbox AS i
                WHERE i.front = 1 AND i.reason IS NULL AND i.type > types.type)
        FROM types WHERE types.type IS NOT NULL
    )
    SELECT min(received) FROM (
        SELECT (SELECT i.received_at FROM {p}inbox AS i
                WHERE i.front = 1 AND i.reason IS NULL AND i.type = types.type
                ORDER BY i.ready_at, i.position LIMIT 1) AS received
        FROM types WHERE types.type IS NOT NULL
    ) AS firsts
""")
_KINDS = Statement(f"""
    WITH RECURSIVE kinds(kind) AS (
        SELECT (SELECT min(kind) FROM {{p}}outbox WHERE {_UNFINISHED})
        UNION ALL
        SELECT (SELECT min(o.kind) FROM {{p}}outbox AS o WHERE {_UNFINISHED} AND o.kind > kinds.kind)
        FROM kinds WHERE kinds.kind IS NOT NULL
    )
    SELECT kind,
        (SELECT count(*) FROM (SELECT 1 FROM {{p}}outbox AS o WHERE {_UNFINISHED} AND o.kind = kinds.kind
            ORDER BY o.due_at LIMIT :max + 1) AS part) AS unfinished,
        (SELECT count(*) FROM (SELECT status FROM {{p}}outbox AS o WHERE {_UNFINISHED} AND o.kind = kinds.kind
            ORDER BY o.due_at LIMIT :max) AS part WHERE part.status = 'delivering') AS delivering,
        (SELECT min(part.created_at) FROM (SELECT created_at FROM {{p}}outbox AS o
            WHERE {_UNFINISHED} AND o.kind = kinds.kind ORDER BY o.due_at LIMIT :max) AS part) AS oldest
    FROM kinds WHERE kind IS NOT NULL
""")
_TROUBLE = Statement("""
    SELECT reason_code, to_status, count(*) AS times FROM (
        SELECT reason_code, to_status FROM {p}transitions
        WHERE (to_status IN ('dead_letter', 'expired') OR from_status = to_status) AND at > :since
        ORDER BY at DESC LIMIT :max
    ) AS part GROUP BY reason_code, to_status
""")
_RUNS = Statement("""
    SELECT count(*) AS runs, count(CASE WHEN end_reason = 'conflict' THEN 1 END) AS conflicts FROM (
        SELECT end_reason FROM {p}runs WHERE started_at > :since ORDER BY started_at DESC LIMIT :max
    ) AS part
""")
# The first condition is the index's own, word for word: SQLite asks for that.
_ENDED = Statement("""
    SELECT end_reason, count(*) AS times FROM (
        SELECT end_reason FROM {p}runs WHERE end_reason <> 'committed'
            AND end_reason IN ('conflict', 'failed', 'interrupted', 'stale', 'released') AND ended_at > :since
        LIMIT :max
    ) AS part GROUP BY end_reason
""")
_CONFLICTED = Statement("""
    SELECT stream, count(*) AS times FROM (
        SELECT stream FROM {p}runs
        WHERE end_reason <> 'committed' AND end_reason = 'conflict' AND ended_at > :since
        ORDER BY ended_at DESC LIMIT :max
    ) AS part GROUP BY stream ORDER BY count(*) DESC, stream LIMIT :listed
""")
# Queues has a row only for what is under way, so that a walk over it is one over unfinished work.
_PARKED = Statement("SELECT stream FROM {p}queues WHERE until IS NULL ORDER BY stream LIMIT :listed")


def snapshot(conn: Connection, *, now: int, hour: int = HOUR) -> Snapshot:
    """How things stand at `now`, for a read transaction; `hour` is the length of `lately`, in microseconds."""
    dialects.distrust_statistics(conn)
    since = now - hour
    kinds = _kinds(conn, now)
    trouble = _TROUBLE(conn, since=since, max=COUNT_MAX).mappings()
    trouble = [row for row in trouble if row["reason_code"] not in transitions.RESOLVED]
    by_reason = _counts(trouble, "reason_code")
    by_status = _counts([row for row in trouble if row["reason_code"] not in transitions.STALE], "to_status")
    ran = _RUNS(conn, since=since, max=COUNT_MAX).one()
    oldest, due = _OLDEST_EVENT(conn).scalar_one(), timers.next_due(conn)
    return Snapshot(
        now=now,
        events_waiting=_bounded(_WAITING, conn),
        events_dead=_dead(conn),
        oldest_event_age=_age(oldest, now),
        dispatches={
            Status.PENDING: sum(kind.pending for kind in kinds),
            Status.DELIVERING: sum(kind.delivering for kind in kinds),
        },
        oldest_dispatch_age=max((kind.oldest_age for kind in kinds), default=0),
        kinds=kinds,
        trouble=by_reason,
        dead_lately=by_status[Status.DEAD_LETTER],
        expired_lately=by_status[Status.EXPIRED],
        # A delivering dispatch that is attempted again was taken from a claimant whose lease was over.
        lease_losses_lately=by_reason[Reason.ATTEMPT] + by_reason[Reason.LEASE_LOST],
        stale_settles_lately=sum(by_reason[reason] for reason in transitions.STALE),
        pump_lag=_age(due, now),
        runs=Bounded(ran.runs, more=ran.runs >= COUNT_MAX),
        conflict_rate=ran.conflicts / ran.runs if ran.runs else 0.0,
        runs_ended=_counts(_ENDED(conn, since=since, max=COUNT_MAX).mappings(), "end_reason"),
        conflicted=[
            StreamCount(row.stream, row.times)
            for row in _CONFLICTED(conn, since=since, max=COUNT_MAX, listed=LISTED_MAX)
        ],
        parked=list(_PARKED(conn, listed=PARKED_MAX).scalars()),
        alerts_unrung=_bounded(_UNRUNG, conn),
    )


def _bounded(statement: Statement, conn: Connection) -> Bounded:
    count = statement(conn, max=COUNT_MAX).scalar_one()
    return Bounded(min(count, COUNT_MAX), more=count > COUNT_MAX)


def _dead(conn: Connection) -> Bounded:
    found = _DEAD(conn, max=COUNT_MAX).one()
    return Bounded(min(found.dead, COUNT_MAX), more=found.ended > COUNT_MAX)


def _kinds(conn: Connection, now: int) -> list[KindStatus]:
    return [
        KindStatus(
            kind=row.kind,
            pending=min(row.unfinished, PER_KIND_MAX) - row.delivering,
            delivering=row.delivering,
            oldest_age=_age(row.oldest, now),
            more=row.unfinished > PER_KIND_MAX,
        )
        for row in _KINDS(conn, max=PER_KIND_MAX)
    ]


def _counts(rows: Any, column: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row[column]] += row["times"]
    return counts


def _age(since: int | None, now: int) -> int:
    return 0 if since is None else max(0, now - since)
