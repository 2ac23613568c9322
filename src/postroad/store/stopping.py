"""Stopping streams: an event in the inbox says so, hence it is in order with all others and locks nothing.

Whatever people had published before it is withdrawn by the next claim. A turn that was begun before it is not
forgotten: its run ends with a word in the log on what it did, at once, when it is found, or at its next attempt.
"""

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.events import STOP_NAME, TASK_NAME
from postroad.model.rows import NewEvent
from postroad.store import audit, dialects, inbox
from postroad.store.audit import Operator
from postroad.store.statements import Statement, as_json

WITHDRAWN = "turn.withdrawn"
_UNSEEN = f"i.kind = '{STOP_NAME}' AND i.reason IS NULL"  # as the index says it
# The position of a stream's last stop that nobody has seen to. Without its type: another index would offer itself.
LAST = f"(SELECT max(i.position) FROM {{p}}inbox i WHERE {_UNSEEN} AND i.stream = %s)"

# Under the stream's lock. What the runtime itself has to say (outcomes, timers, reports) stays; a task is work.
_WITHDRAW = Statement(
    "UPDATE {p}inbox SET reason = :why, ready_at = :now WHERE type = :type AND stream = :stream AND reason IS NULL "
    f"AND position < :stop AND (kind NOT LIKE 'postroad.%%' OR kind = '{TASK_NAME}')"
)
_ASKED = Statement(
    "SELECT q.stream, q.claim_token, q.picked, i.position FROM {p}inbox i JOIN {p}queues q ON q.stream = i.stream "
    f"WHERE {_UNSEEN} AND q.type {{in_list:types}} AND q.picked IS NOT NULL "
    "UNION ALL SELECT q.stream, NULL, q.picked, NULL FROM {p}queues q "
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


def is_behind(picked: str | None, stop: int | None) -> bool:
    """Whether a stream was stopped after a stored set of events was taken."""
    return stop is not None and stop > max(positions(picked), default=stop)


def positions(picked: str | None) -> list[int]:
    """The inbox positions of a stored set."""
    return msgspec.json.decode(picked, type=list[int]) if picked else []


def withdraw(conn: Connection, stops: Mapping[str, int], *, now: int) -> None:
    """Withdraw what people published to these streams before the stop at the position given; they are locked."""
    for stream, stop in sorted(stops.items()):
        _WITHDRAW(conn, type=ids.stream_type(stream), stream=stream, stop=stop, why=WITHDRAWN, now=now)


def event(stream: str, token: str) -> NewEvent:
    """The event that stops a stream."""
    return NewEvent(stream=stream, event_id=f"{STOP_NAME}:{token}", kind=STOP_NAME, data="{}")


def stop_by(conn: Connection, stream: str, *, token: str, by: Operator, now: int) -> None:
    """Stop a stream for an operator, audited. Raises StreamDeleted."""
    waiting = inbox.waiting(conn, stream)
    inbox.publish(conn, [event(stream, token)], now=now)
    audit.record(conn, "stream.stop", stream, by=by, before={"waiting": waiting}, after={}, now=now)
    dialects.notify_at_commit(conn, frozenset({"turns"}))


def asked(conn: Connection, types: Sequence[str]) -> list[Asked]:
    """Streams of these types that were stopped after their turn was begun, or deleted while it was parked."""
    rows = _ASKED(conn, types=as_json(types), parked=as_json(types))
    behind = {row.stream: row for row in rows if row.position is None or is_behind(row.picked, row.position)}
    return [Asked(stream=stream, claim_token=row.claim_token) for stream, row in behind.items()]


def hurry(conn: Connection, streams: Sequence[str], *, now: int) -> None:
    """Let turns that back off or are parked be found at once, to be ended."""
    _HURRY(conn, streams=as_json(sorted(streams)), now=now)
