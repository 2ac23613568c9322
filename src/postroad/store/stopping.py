"""Stopping streams: an event in the inbox says so, hence it is in order with all others and locks nothing.

Whatever people had published before it is withdrawn by the next claim. A turn that was begun before it is not
forgotten: its run ends with a word in the log on what it did, at once, when it is found, or at its next attempt.

An event of the same kind cancels a single task: that is withdrawn, or the turn ends that was begun for it alone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.events import STOP_NAME, TASK_NAME
from postroad.model.rows import InboxEvent, NewEvent
from postroad.store import audit, dialects, inbox
from postroad.store.audit import Operator
from postroad.store.statements import Row, Statement, as_json

WITHDRAWN = "turn.withdrawn"
_UNSEEN = f"i.kind = '{STOP_NAME}' AND i.reason IS NULL"  # as the index says it
_ONE_TASK = f"{STOP_NAME}/"  # what the ids of stops begin with that are for the task named behind it
# What a stop asks, as one number: the end of the task at this position, NULL if it is in the log, or of all that stands
# in front of -position.
_ASKS = (
    f"CASE WHEN substr(i.event_id, 1, {len(_ONE_TASK)}) = '{_ONE_TASK}' THEN (SELECT t.position FROM {{p}}inbox t "
    f"WHERE t.stream = i.stream AND t.event_id = substr(i.event_id, {len(_ONE_TASK) + 1})) ELSE -i.position END"
)
# What is asked of a stream, as JSON, and nobody has seen to. Without its type: another index would offer itself.
ASKS = f"nullif(CAST((SELECT {{json_agg}}({_ASKS}) FROM {{p}}inbox i WHERE {_UNSEEN} AND i.stream = %s) AS text), '[]')"

# Under the stream's lock. What the runtime itself has to say (outcomes, timers, reports) stays; a task is work.
_WITHDRAW = Statement(
    "UPDATE {p}inbox SET reason = :why, ready_at = :now WHERE type = :type AND stream = :stream AND reason IS NULL "
    f"AND position < :stop AND (kind NOT LIKE 'postroad.%%' OR kind = '{TASK_NAME}')"
)
_CANCEL = Statement(
    "UPDATE {p}inbox SET reason = :why, ready_at = :now WHERE position {in_ints:positions} AND " + inbox.UNDEAD
)
_ASKED = Statement(
    f"SELECT q.stream, q.claim_token, q.picked, {_ASKS} AS asks "
    "FROM {p}inbox i JOIN {p}queues q ON q.stream = i.stream "
    f"WHERE {_UNSEEN} AND q.type {{in_list:types}} AND q.picked IS NOT NULL "
    "UNION ALL SELECT q.stream, NULL, q.picked, 0 FROM {p}queues q "
    "WHERE q.until IS NULL AND coalesce(q.type, '-') {in_list:parked} "
    "AND (SELECT s.deleted_at FROM {p}streams s WHERE s.id = q.stream) IS NOT NULL"
)
_HURRY = Statement(
    "UPDATE {p}queues SET until = :now WHERE stream {in_list:streams} AND state IN ('backoff', 'parked')"
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A stream whose turn is to end; `claim_token` None: nobody is at it, it backs off or is parked."""

    stream: str
    claim_token: str | None


def ends(picked: str | None, asks: str | None) -> bool:
    """Whether a turn is to end: its stream was stopped after its set was taken, or all of this is cancelled."""
    return asks is not None and _ends(picked, _numbers(asks))


def _ends(picked: str | None, asked: Sequence[int]) -> bool:
    taken = positions(picked)
    return bool(taken) and (max(taken) < _last(asked) or set(taken) <= set(asked))


def _last(asked: Sequence[int]) -> int:
    """Where the last stop of the whole stream stands; 0: there is none."""
    return max(0, -min(asked, default=0))


def _numbers(asks: str) -> list[int]:
    """What is asked; of a task that is in the log by now nothing."""
    return [each for each in msgspec.json.decode(asks, type=list[int | None]) if each is not None]


def positions(picked: str | None) -> list[int]:
    """The inbox positions of a stored set."""
    return msgspec.json.decode(picked, type=list[int]) if picked else []


def withdraw(conn: Connection, stops: Mapping[str, str], *, now: int) -> None:
    """Withdraw what is asked of these streams; they are locked, and none of it was taken."""
    for stream, asks in sorted(stops.items()):
        asked = _numbers(asks)
        if stop := _last(asked):
            _WITHDRAW(conn, type=ids.stream_type(stream), stream=stream, stop=stop, why=WITHDRAWN, now=now)
        if tasks := [each for each in asked if each > 0]:
            _CANCEL(conn, positions=as_json(tasks), why=WITHDRAWN, now=now)


def event(stream: str, token: str) -> NewEvent:
    """The event that stops a stream."""
    return NewEvent(stream=stream, event_id=f"{STOP_NAME}:{token}", kind=STOP_NAME, data="{}")


def cancelling(stream: str, parent: str, key: str) -> NewEvent:
    """The event that cancels the one task of a stream that was delegated to it."""
    task = f"{_ONE_TASK}{ids.task_id(parent, key)}"
    return NewEvent(stream=stream, event_id=task, kind=STOP_NAME, data=as_json({"parent": parent, "key": key}))


def stops_all(event: InboxEvent) -> bool:
    """Whether an event stops the stream it is in."""
    return event.kind == STOP_NAME and not event.event_id.startswith(_ONE_TASK)


def stop_by(conn: Connection, stream: str, *, token: str, by: Operator, now: int) -> None:
    """Stop a stream for an operator, audited. Raises StreamDeleted."""
    waiting = inbox.waiting(conn, stream)
    inbox.publish(conn, [event(stream, token)], now=now)
    audit.record(conn, "stream.stop", stream, by=by, before={"waiting": waiting}, after={}, now=now)
    dialects.notify_at_commit(conn, frozenset({"turns"}))


def asked(conn: Connection, types: Sequence[str]) -> list[Asked]:
    """Streams of these types whose turn is to end, since they were stopped, or deleted while it was parked."""
    rows = defaultdict[str, list[Row]](list)
    for row in _ASKED(conn, types=as_json(types), parked=as_json(types)):
        rows[row.stream].append(row)
    return [
        Asked(stream=stream, claim_token=of[0].claim_token)
        for stream, of in rows.items()
        if any(row.asks == 0 for row in of) or _ends(of[0].picked, [row.asks for row in of if row.asks is not None])
    ]


def hurry(conn: Connection, streams: Sequence[str], *, now: int) -> None:
    """Let turns that back off or are parked be found at once, to be ended."""
    _HURRY(conn, streams=as_json(sorted(streams)), now=now)
