"""Acknowledgements: the consumer's word that it has a dispatch ends it, whatever a sender is still at.

An ack clears the claim's token like any other end, so that a sender's result that comes after it is stale: it leaves
its mark in the history and changes nothing.
"""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.model.acks import Presented
from postroad.model.clock import moment
from postroad.model.errors import AckNotRequested, AckRefused, BadAckToken, DispatchNotFound
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Reason, Status
from postroad.store import dispatch_filters, moves, outbox
from postroad.store.statements import Row, Statement, as_json

SOURCE = "consumer"
_OPEN = (Status.PENDING, Status.DELIVERING)

_STANDING = Statement(
    f"SELECT o.id, o.status, o.epoch, o.ack_required, o.updated_at, {dispatch_filters.REASON} AS reason "
    "FROM {p}outbox AS o WHERE o.id {in_list:ids}"
)


def acknowledge(
    conn: Connection,
    presented: Sequence[Presented],
    *,
    actor: str,
    withdrawals: Sequence[str] = (),
    now: int,
) -> list[str]:
    """End the dispatches that these tokens acknowledge, and tell their streams `acked`; the ids that this ended.

    One that was acknowledged before is the same success, and nothing is written. What is refused has locked nothing.
    `withdrawals` are the keys that the same transaction withdraws after this: they are locked along with these, so
    that two such transactions wait for each other in one direction only.

    Raises:
        DispatchNotFound, AckNotRequested, BadAckToken, AckRefused: See `check`; nothing was written.
    """
    if not presented or not check(conn, presented):
        return []
    asked = sorted({each.dispatch for each in presented})
    locked = moves.lock(conn, [*asked, *outbox.pending(conn, withdrawals)])
    check(conn, presented)  # as they stand now that nobody else can change them
    failpoint("acks.verified")
    rows = [locked[id] for id in asked if locked[id].status in _OPEN]
    made = [
        moves.move(row, Status.ACKED, Reason.ACKED, _summary(row), source=SOURCE, actor=actor, error=None)
        for row in rows
    ]
    moves.apply(conn, made, now=now)
    return [row.id for row in rows]


def check(conn: Connection, presented: Sequence[Presented]) -> bool:
    """Whether any of these tokens has something to acknowledge; False: all of it was acknowledged before.

    Whatever speaks against a token, it has cost the same look and the same proof. Locks nothing.

    Raises:
        DispatchNotFound: There is no such dispatch.
        AckNotRequested: It asked for no acknowledgement.
        BadAckToken: The token is not of this dispatch, of an earlier epoch, or of another key.
        AckRefused: It has ended otherwise; the error says how and since when.
    """
    found = {row.id: row for row in _STANDING(conn, ids=as_json([each.dispatch for each in presented]))}
    still = [_is_open(found.get(each.dispatch), each) for each in presented]
    return any(still)


def _is_open(row: Row | None, each: Presented) -> bool:
    proven = each.proves(0 if row is None else row.epoch)
    if row is None:
        raise DispatchNotFound(each.dispatch, dispatch=each.dispatch)
    if not row.ack_required:
        raise AckNotRequested(row.id, dispatch=row.id)
    if not proven:
        raise BadAckToken
    if row.status not in (*_OPEN, Status.ACKED):
        since = moment(row.updated_at).isoformat(timespec="seconds")
        raise AckRefused(
            f"It is {row.status} by {row.reason} since {since}.",
            dispatch=row.id, status=row.status, reason=row.reason, since=since,
        )  # fmt: skip
    return bool(row.status != Status.ACKED)


def _summary(row: moves.Standing) -> str:
    when = "while attempt {} was under way" if row.status is Status.DELIVERING else "after {} attempts"
    return f"acknowledged {when.format(row.attempt)}"
