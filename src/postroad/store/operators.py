"""What operators do to dispatches: each verb's rows, history and audit are written in one transaction.

A verb takes ids and says what became of each: done, or refused with a sentence; an id that is not there is neither.
Whatever happened between an operator's look and the verb is seen under the rows' locks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection

from postroad.model.errors import KeyConflict, StaleClaim
from postroad.model.lifecycle import TERMINAL, Reason, Status
from postroad.model.rows import NewDispatch, NewTransition
from postroad.store import audit, dialects, dispatch_filters, lanes, moves, outbox, purging, transitions
from postroad.store.audit import Operator
from postroad.store.dispatch_filters import Chosen
from postroad.store.moves import Standing
from postroad.store.statements import Row, Statement, as_json

RETRIABLE = (Status.DEAD_LETTER, Status.EXPIRED)
IN_FLIGHT = (Status.PENDING, Status.DELIVERING)
FINISHED = tuple(sorted(TERMINAL))
# What a person has to think about, or has decided upon: not for a verb that is told "all of them".
_LEFT_ALONE = frozenset({Reason.UNKNOWN_OUTCOME, Reason.WITHDRAWN}) | transitions.RESOLVED
SOURCE = "operator"
HOW = ("sent", "resend", "discard")
How = Literal["sent", "resend", "discard"]
_SAYS_ARRIVED = f"'{Reason.STALE_OK}', '{Reason.RESOLVED_SENT}'"
_TOPICS = frozenset({"sends", "turns"})

_STORIES = Statement(f"""
SELECT o.id, {dispatch_filters.REASON} AS reason, (
    SELECT t.reason_code FROM {{p}}transitions AS t
    WHERE t.entity = o.id AND t.reason_code IN ({_SAYS_ARRIVED}) ORDER BY t.id DESC LIMIT 1
) AS arrived
FROM {{p}}outbox AS o WHERE o.id {{in_list:ids}}
""")

_REVIVE = Statement("""
UPDATE {p}outbox AS o
SET status = 'pending', attempt = 0, epoch = o.epoch + 1, due_at = revived.due_at, first_attempt_at = NULL,
    max_attempts = NULL, expires_at = revived.expires_at, receipt = NULL, last_error = NULL, updated_at = :now
FROM {rows:revived(id text, due_at int, expires_at int)}
WHERE o.id = revived.id AND o.status IN ('dead_letter', 'expired')
""")

_WHOLE = Statement("SELECT o.*, o.policy AS on_failure FROM {p}outbox AS o WHERE o.id = :id")


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb came to, by id: what it did, and why it left others as they are. `now`: when.

    `made`: the id of the dispatch that a replay has made.
    """

    done: list[str]
    refused: dict[str, str]
    now: int
    made: str | None = None


class Many(msgspec.Struct, frozen=True, kw_only=True):
    """That a filter chose the dispatches, not a person one by one.

    `filter`: as text for the audit; `fitting`: its conditions, which must still hold; `cautious`: what a person has
    to think about is left alone.
    """

    filter: str
    fitting: Chosen
    cautious: bool


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """How a verb is to be carried out. `force`: whatever speaks against it."""

    by: Operator
    force: bool = False
    many: Many | None = None


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """When retried dispatches are due, and for how long after that; microseconds.

    The first at `began` (None: now), each later one `gap` after the one before; `position` have gone before these.
    """

    expires: int | None = None
    gap: int = 0
    position: int = 0
    began: int | None = None

    def further(self, number: int, *, began: int) -> "Due":
        """After so many more; `began` holds if nothing has begun before."""
        first = began if self.began is None else self.began
        return msgspec.structs.replace(self, position=self.position + number, began=first)

    def times(self, number: int, *, now: int) -> list[int]:
        """The due times of the next `number` dispatches, none of them before now."""
        began = now if self.began is None else self.began
        return [max(now, began + (self.position + place) * self.gap) for place in range(number)]


_Check = Callable[[Standing, Row], str]


def hold(conn: Connection, ids: Sequence[str]) -> None:
    """Lock what a verb will act upon; `now` is read after it, so that history stays in order."""
    moves.lock(conn, ids)


def retry(conn: Connection, ids: Sequence[str], *, orders: Orders, due: Due, now: int) -> Answered:
    """Give dead letters and expired dispatches a new epoch: attempt 0, no error, the same key, due again."""

    def refusal(row: Standing, story: Row) -> str:
        return _not_retriable(row, story, orders)

    rows, refused = _chosen(conn, ids, refusal, orders)
    _revive(conn, rows, due, orders.by, now=now)
    return _answered(conn, "dispatch.retry", rows, refused, orders, now=now)


def withdraw(conn: Connection, ids: Sequence[str], *, orders: Orders, now: int) -> Answered:
    """End pending dispatches that are no longer wanted; their streams are told `expired`."""
    rows, refused = _chosen(conn, ids, _not_withdrawable, orders)
    said = _with_reason("withdrawn", orders.by)
    made = [_by(orders.by, row, Status.EXPIRED, Reason.WITHDRAWN, said) for row in rows]
    moves.apply(conn, made, now=now)
    return _answered(conn, "dispatch.withdraw", rows, refused, orders, now=now)


def purge(conn: Connection, ids: Sequence[str], *, orders: Orders, history: bool = False, now: int) -> Answered:
    """Delete finished dispatches, with `force` unfinished ones too, and with `history` their history.

    Their keys stay taken by tombstones. What is in flight is withdrawn first, so that its stream hears of its end; a
    sender that is at it finds nothing to settle.
    """

    def refusal(row: Standing, story: Row) -> str:
        return f"it is {row.status}, and not finished" if row.status in IN_FLIGHT and not orders.force else ""

    rows, refused = _chosen(conn, ids, refusal, orders)
    said = _with_reason("purged in flight", orders.by)
    ended = [_by(orders.by, row, Status.EXPIRED, Reason.WITHDRAWN, said) for row in rows if row.status in IN_FLIGHT]
    moves.apply(conn, ended, now=now)
    purging.purge(conn, rows, history=history, now=now)
    return _answered(conn, "dispatch.purge", rows, refused, orders, now=now, history="purged" if history else "kept")


def resolve(conn: Connection, id: str, how: How, *, orders: Orders, due: Due, now: int) -> Answered:
    """Say what became of a dead letter that may have arrived.

    sent: it did, and its stream is told `delivered`, as for a success that is heard of late. discard: nobody minds.
    Both are a word in the history, no change. resend: a new epoch, as a retry.
    """

    def refusal(row: Standing, story: Row) -> str:
        return _not_resolvable(row, story) or (_not_retriable(row, story, orders) if how == "resend" else "")

    rows, refused = _chosen(conn, [id], refusal, orders)
    if how == "resend":
        _revive(conn, rows, due, orders.by, now=now)
    else:
        reason = Reason.RESOLVED_SENT if how == "sent" else Reason.RESOLVED_DISCARDED
        told = Status.DELIVERED if how == "sent" else None
        said = _with_reason(f"resolved: {how}", orders.by)
        made = [_by(orders.by, row, row.status, reason, said, late=True, told=told, error=None) for row in rows]
        moves.apply(conn, made, now=now)
    return _answered(conn, "dispatch.resolve", rows, refused, orders, now=now, how=how)


def replay(
    conn: Connection, id: str, *, new_id: str, key: str = "", expires: int | None = None, orders: Orders, now: int
) -> Answered:
    """Send what a finished dispatch says once more, as a new one with a key of its own that names the old as origin.

    `key` '': its id. `expires`: no attempt later than so many microseconds from now; None: no such bound.
    """

    def refusal(row: Standing, story: Row) -> str:
        return "" if row.status in TERMINAL else f"it is {row.status}: it is still to be sent"

    rows, refused = _chosen(conn, [id], refusal, orders)
    made: str | None = None
    for row in rows:
        new = _copy(conn, row, now=now, id=new_id, key=key, expires=expires)
        taken = _enqueue(conn, new, orders.by, now=now)
        if taken:
            return Answered(done=[], refused={row.id: taken}, now=now)
        made = new_id
    return _answered(conn, "dispatch.replay", rows, refused, orders, now=now, made=made)


def _chosen(
    conn: Connection, ids: Sequence[str], refusal: _Check, orders: Orders
) -> tuple[list[Standing], dict[str, str]]:
    """Of these ids, in their order: the rows that a verb may act upon, locked, and why not upon others."""
    locked = moves.lock(conn, ids)
    stories = {row.id: row for row in _STORIES(conn, ids=as_json(list(locked)))}
    said = {id: refusal(locked[id], stories[id]) for id in ids if id in locked}
    if orders.many is not None:
        fitting = orders.many.fitting & dispatch_filters.among(list(locked))
        still = set(dispatch_filters.query(conn, "o.id", fitting).scalars())
        said |= {id: "it changed meanwhile" for id in ids if id not in still}
    return [locked[id] for id, no in said.items() if not no], {id: no for id, no in said.items() if no}


def _not_retriable(row: Standing, story: Row, orders: Orders) -> str:
    if row.status not in RETRIABLE:
        return f"it is {row.status}; only dead_letter and expired can be retried"
    if orders.force:
        return ""
    if story.arrived is not None:
        return "its history says that it has arrived"
    if orders.many is not None and orders.many.cautious and story.reason in _LEFT_ALONE:
        return f"its reason is {story.reason}, which has to be named"
    return ""


def _not_withdrawable(row: Standing, story: Row) -> str:
    if row.status is Status.DELIVERING:
        return f"too late: attempt {row.attempt} is under way"
    return "" if row.status is Status.PENDING else f"too late: it is {row.status}"


def _not_resolvable(row: Standing, story: Row) -> str:
    if row.status is Status.DEAD_LETTER and story.reason in transitions.RESOLVED:
        return f"it was resolved before: {story.reason}"
    if row.status is not Status.DEAD_LETTER or story.reason != Reason.UNKNOWN_OUTCOME:
        return (
            f"it is {row.status} by {story.reason}; only what may have arrived ({Reason.UNKNOWN_OUTCOME}) is resolved"
        )
    return ""


def _revive(conn: Connection, rows: Sequence[Standing], due: Due, by: Operator, *, now: int) -> None:
    """Start a new epoch of each of these rows, which are locked."""
    if not rows:
        return
    times = due.times(len(rows), now=now)
    revived = [
        {"id": row.id, "due_at": at, "expires_at": None if due.expires is None else at + due.expires}
        for row, at in zip(rows, times, strict=True)
    ]
    written = _REVIVE(conn, revived=as_json(revived), now=now).rowcount
    if written != len(rows):
        raise StaleClaim(f"{len(rows) - written} of {len(rows)} dispatches had moved on.")
    lanes.rejoin(
        conn,
        [
            lanes.Member(lane=row.lane, dispatch=row.id, kind=row.kind, due_at=at)
            for row, at in zip(rows, times, strict=True)
            if row.lane is not None
        ],
    )
    said = _with_reason("retried", by)
    transitions.record(
        conn,
        [
            NewTransition(
                entity=row.id,
                from_status=row.status,
                to_status=Status.PENDING,
                reason_code=Reason.OPERATOR_RETRY,
                summary=said,
                source=SOURCE,
                actor=by.actor,
                metadata=as_json({"attempt": 0, "epoch": row.epoch + 1, "last_error": row.last_error}),
            )
            for row in rows
        ],
        now=now,
    )


def _by(by: Operator, row: Standing, to: Status, reason: Reason, summary: str, **changes: Any) -> moves.Move:
    return moves.move(row, to, reason, summary, source=SOURCE, actor=by.actor, **changes)


def _with_reason(what: str, by: Operator) -> str:
    return f"{what}: {by.reason}" if by.reason else what


def _copy(conn: Connection, row: Standing, *, now: int, id: str, key: str, expires: int | None) -> NewDispatch:
    """The same content to the same destination, due now."""
    (whole,) = _WHOLE(conn, id=row.id).mappings()
    origin = {**msgspec.json.decode(whole["origin"]), "replay_of": row.id}
    new = {
        "id": id,
        "key": key,
        "due_at": now,
        "expires_at": None if expires is None else now + expires,
        "max_attempts": None,
        "origin": as_json(origin),
    }
    return msgspec.convert({**whole, **new}, NewDispatch, strict=False)


def _enqueue(conn: Connection, new: NewDispatch, by: Operator, *, now: int) -> str:
    """Write a new dispatch; why it cannot be, if its key is taken."""
    try:
        (written,) = outbox.insert(conn, [new], source=SOURCE, actor=by.actor, in_turn=False, now=now)
    except KeyConflict:
        return f"the key {new.key} is taken"
    return "" if written.created else f"the key {new.key} is taken by {written.id}"


def _answered(
    conn: Connection,
    action: str,
    rows: Sequence[Standing],
    refused: Mapping[str, str],
    orders: Orders,
    *,
    now: int,
    made: str | None = None,
    **how: str,
) -> Answered:
    """The answer of a verb that acted upon these rows, with the audit of it: one row for all that a filter chose."""
    told = {**how, "force": orders.force} | ({"made": made} if made else {})
    if orders.many is None:
        for row in rows:
            audit.record(conn, action, row.id, by=orders.by, before=_before(row), after=told, now=now)
    elif rows:
        after = {**told, "done": len(rows), "refused": len(refused), "ids": [row.id for row in rows]}
        audit.record(conn, action, orders.many.filter, by=orders.by, before={}, after=after, now=now)
    if rows:
        dialects.notify_at_commit(conn, _TOPICS)
    return Answered(done=[row.id for row in rows], refused=dict(refused), now=now, made=made)


def _before(row: Standing) -> dict[str, Any]:
    """What stood there, without body and token."""
    kept = ("key", "stream", "kind", "destination", "status", "attempt", "epoch", "expires_at", "last_error", "receipt")
    return {name: getattr(row, name) for name in kept}
