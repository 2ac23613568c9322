"""The timers of crons: each is armed, or the event of its last fire waits in its stream.

Whoever looks after one locks its row first and asks for the event in a later statement, whose snapshot shows any turn
that armed it again before the lock was had.
"""

from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.crons import TIMER, TYPE_PREFIX, Fire, Standing, written
from postroad.model.ids import timer_event_id
from postroad.model.rows import TimerChange
from postroad.store import dialects, timers
from postroad.store.statements import Row, Statement, as_json

Decide = Callable[[Standing, int], TimerChange | Fire | None]

_LOCK = Statement("SELECT 1 FROM {p}timers AS t WHERE t.stream = :stream AND t.key = :key {for_update}")
_WAITING = """
    (SELECT i.position FROM {p}inbox AS i WHERE i.stream = t.stream AND i.reason IS NULL AND i.event_id =
     CASE WHEN t.generation = 0 THEN :event ELSE :event2 || CAST(t.generation AS text) END) AS waiting
"""
_FOUND = Statement(f"""
    SELECT value AS stream, t.status, t.fire_at, t.data, {_WAITING},
    (SELECT s.deleted_at FROM {{p}}streams AS s WHERE s.id = value) AS deleted_at
    FROM {{list:streams}} LEFT JOIN {{p}}timers AS t ON t.stream = value AND t.key = :key
""")
_CONFIRM = Statement("UPDATE {p}timers SET data = :data, updated_at = :now WHERE stream = :stream AND key = :key")
# Names that sort between these two are those of crons' streams: the primary key finds them.
_LISTED = Statement(f"""
    SELECT t.stream, t.status, t.fire_at, t.data, {_WAITING},
    (SELECT q.state FROM {{p}}queues AS q WHERE q.stream = t.stream) AS queue,
    (SELECT r.run_id FROM {{p}}runs AS r WHERE r.stream = t.stream
     ORDER BY r.started_at DESC, r.attempt DESC LIMIT 1) AS run
    FROM {{p}}timers AS t WHERE t.stream >= :least AND t.stream < :most AND t.key = :key
    ORDER BY t.stream LIMIT :limit
""")
_RUNS = Statement("SELECT run_id, started_at, ended_at, end_reason, error FROM {p}runs WHERE run_id {in_list:runs}")


class LastRun(msgspec.Struct, frozen=True, kw_only=True):
    """The latest attempt at a cron's turn; `end` None: it is under way, or its process was lost."""

    started_at: int
    ended_at: int | None
    end: str | None
    error: str | None


class CronRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cron as the database knows it, whether or not any process declares it still.

    `queue`: what its stream waits for (claimed, backoff, parked, ready), None: nobody is at it.
    """

    stream: str
    status: str
    fire_at: int
    fire: Fire | None
    waiting: bool
    queue: str | None
    last: LastRun | None


def standing(conn: Connection, streams: Sequence[str]) -> dict[str, Standing]:
    """Where the timers in these streams stand, by stream."""
    dialects.distrust_statistics(conn)
    return {row.stream: _standing(row) for row in _FOUND(conn, streams=as_json(streams), **_KEYS)}


def keep(conn: Connection, stream: str, decide: Decide, *, now: int) -> TimerChange | Fire | None:
    """Do with a cron's timer what `decide` says of where it stands: arm it, write down another payload, or nothing.

    Raises:
        TimerConflict: Others have armed it for the first time meanwhile. Nothing was written.
    """
    _LOCK(conn, stream=stream, key=TIMER).all()
    done = decide(standing(conn, [stream])[stream], now)
    if isinstance(done, TimerChange):
        timers.apply(conn, [done], now=now)
    elif done is not None:
        _CONFIRM(conn, stream=stream, key=TIMER, data=written(done), now=now)
    return done


def list_(conn: Connection, *, limit: int) -> list[CronRow]:
    """The crons that the database knows, by name."""
    dialects.distrust_statistics(conn)
    least, most = TYPE_PREFIX, TYPE_PREFIX[:-1] + chr(ord(TYPE_PREFIX[-1]) + 1)
    found = _LISTED(conn, least=least, most=most, limit=limit, **_KEYS).all()
    runs = {row.run_id: row for row in _RUNS(conn, runs=as_json([row.run for row in found if row.run]))}
    return [
        CronRow(
            stream=row.stream,
            status=row.status,
            fire_at=row.fire_at,
            fire=_standing(row).fire,
            waiting=row.waiting is not None,
            queue=row.queue,
            last=_last(runs.get(row.run)),
        )
        for row in found
    ]


_KEYS = {"key": TIMER, "event": timer_event_id(TIMER, 0), "event2": timer_event_id(TIMER, 0) + "#"}


def _standing(row: Row) -> Standing:
    return Standing(
        stream=row.stream,
        status=row.status,
        fire_at=row.fire_at,
        data=row.data,
        waiting=row.waiting is not None,
        deleted=getattr(row, "deleted_at", None) is not None,
    )


def _last(row: Row | None) -> LastRun | None:
    if row is None:
        return None
    return LastRun(started_at=row.started_at, ended_at=row.ended_at, end=row.end_reason, error=row.error)
