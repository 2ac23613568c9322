"""What a person decides about a parked stream: its turn is run again, goes on with what is recorded, or is given up."""

from typing import Literal, get_args

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.store import audit, operations, queues, stopping
from postroad.store.audit import Operator
from postroad.store.statements import Statement, as_json

How = Literal["retry", "continue", "discard"]
HOW: tuple[How, ...] = get_args(How)


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it was done; `refused` says why not. `calls`: how many tool calls the turn had made."""

    done: bool
    refused: str = ""
    calls: int = 0


_EVENTS = Statement("SELECT event_id FROM {p}inbox WHERE position {in_ints:positions} ORDER BY position")
_STATE = Statement(
    "SELECT state, attempts, picked, (SELECT s.deleted_at FROM {p}streams AS s WHERE s.id = q.stream) AS deleted_at "
    "FROM {p}queues AS q WHERE stream = :stream"
)
_FREE = Statement(
    "UPDATE {p}queues SET state = 'ready', until = :now, attempts = 0 WHERE stream = :stream AND state = 'parked'"
)


def resolve(conn: Connection, stream: str, how: How, *, by: Operator, now: int) -> Resolution:
    """Let a parked stream go.

    `retry`: its turn is run again as if it had called nothing; what it did may be done twice. `continue`: it is run
    again, gets the recorded results, and of an unsafe call without one it hears that nobody knows. `discard`: the
    next worker records that it was stopped, with all that it did, and the stream moves on.
    """
    queues.locked(conn, [stream])
    found = _STATE(conn, stream=stream).one_or_none()
    if found is None or found.state != "parked":
        state = "free" if found is None else found.state
        return Resolution(done=False, refused=f"The stream is not parked (it is {state}).")
    if found.deleted_at is not None:
        return Resolution(done=False, refused="The stream was deleted; nothing of its turn is run again.")
    events = _EVENTS(conn, positions=as_json(stopping.positions(found.picked))).scalars()
    turn_id = ids.turn_id(stream, events)
    calls = len(operations.of_turn(conn, turn_id))
    operations.resolve(conn, turn_id, how)
    _FREE(conn, stream=stream, now=now)
    before = {"state": found.state, "attempts": found.attempts, "turn": turn_id, "calls": calls}
    audit.record(conn, f"stream.resolve.{how}", stream, by=by, before=before, after={"state": "ready"}, now=now)
    return Resolution(done=True, calls=calls)
