"""How attempts end: status, history, error, due time, outcome and alert in ONE guarded transaction."""

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Next, Reason, Result, Status, after_attempt
from postroad.model.payload import PAYLOAD_BYTES_MAX, safe_error
from postroad.model.rows import Settled, Settlement
from postroad.store import dialects, gates, moves, transitions
from postroad.store.statements import Statement, as_json

# A delivering one expires only when its lease is over: until then its sender may still be sending.
_OVERDUE = Statement(
    "SELECT " + moves.COLUMNS + " FROM {p}outbox AS o "
    "WHERE o.expires_at <= :now AND o.status IN ('pending', 'delivering') "
    "AND (o.status = 'pending' OR o.due_at <= :now) "
    "ORDER BY o.expires_at LIMIT :limit {skip_locked}"
)

_HELD = Statement("SELECT id, claim_token FROM {p}outbox WHERE id {in_list:ids}")
_LATE_WORDS = Statement(
    "SELECT entity, metadata FROM {p}transitions WHERE entity {in_list:ids} "
    f"AND reason_code IN ({', '.join(repr(str(reason)) for reason in sorted(transitions.STALE))})"
)
_SAID: dict[Result, str] = {
    "ok": "sent",
    "failed": "failed",
    "permanent": "failed for good",
    "unknown": "may have arrived",
    "cut_short": "was cut short",
    "unreachable": "could not reach its destination",
}


def lock(conn: Connection, settlements: Sequence[Settlement]) -> dict[str, moves.Standing]:
    """Lock these settlements' dispatches; `now` is read after it, so that a wait costs nobody a lease."""
    dialects.distrust_statistics(conn)
    in_lanes = [each.lane for each in settlements if each.lane is not None]
    return moves.lock(conn, [each.id for each in settlements], in_lanes=in_lanes)


def unsettled(conn: Connection, settlements: Sequence[Settlement]) -> set[str]:
    """Which of them hold their dispatch still: what to settle again after the answer of a COMMIT was lost."""
    tokens = {each.id: each.token for each in settlements}
    return {row.id for row in _HELD(conn, ids=as_json(sorted(tokens))) if row.claim_token == tokens[row.id]}


def unheard(conn: Connection, late: Sequence[Settlement]) -> set[str]:
    """Of which of these, which came after their claims were over, the history says nothing: the same question."""
    words = _LATE_WORDS(conn, ids=as_json([each.id for each in late]))
    told = [(row.entity, msgspec.json.decode(row.metadata)) for row in words]
    heard = {(entity, about["attempt"], about["epoch"]) for entity, about in told}
    return {each.id for each in late if (each.id, each.attempt, each.epoch) not in heard}


def settle(
    conn: Connection,
    settlements: Sequence[Settlement],
    *,
    locked: Mapping[str, moves.Standing] | None = None,
    now: int,
) -> list[Settled]:
    """Write attempts' results, each under its claim's token, and say in the same order what became of them.

    A lease that is over does not matter as long as the token is the current one. Under any other token no
    status changes: the attempt's history is written, and if it succeeded its outcome too. What asked for an
    acknowledgement is pending again once it was sent, for its whole delay, and has no outcome yet. A dispatch that was
    purged leaves nothing to write to; its status is then "". `locked` is what `lock` has returned in this
    transaction.
    """
    standing = dict(lock(conn, settlements) if locked is None else locked)
    failpoint("settle.locked")
    made: list[moves.Move] = []
    settled: list[Settled] = []
    for each in settlements:
        row = standing.get(each.id)
        if row is None:
            settled.append(Settled(each.id, "", _late_reason(each), True))
            continue
        fresh = row.claim_token == each.token
        move = _ended(row, each, now=now) if fresh else _late(row, each)
        settled.append(Settled(each.id, move.to, move.reason, not fresh))
        made.append(move)
        # The same dispatch once more in this call: its claim is over by now.
        standing[each.id] = msgspec.structs.replace(row, status=move.to, claim_token=None) if fresh else row
    moves.apply(conn, made, now=now)
    gates.settle(conn, [each for each, end in zip(settlements, settled, strict=True) if not end.stale], now=now)
    return settled


def _ended(row: moves.Standing, each: Settlement, *, now: int) -> moves.Move:
    """The move that an attempt's result makes of its dispatch."""
    attempts_max = row.max_attempts or each.policy.retry.attempts
    following = after_attempt(
        each.result,
        each.policy.retry,
        attempt=row.attempt,
        attempts_max=attempts_max,
        first_attempt_at=row.first_attempt_at or now,
        now=now,
        fraction=each.fraction,
        floor=each.floor,
        ack=bool(row.ack_required),
        patience=each.policy.patience,
    )
    held = following.reason is Reason.HELD
    summary, error = _said(f"attempt {row.attempt} of {attempts_max} {_SAID[each.result]}", each)
    if row.ack_required and each.result == "ok":
        summary += ", not acknowledged yet"
    return moves.move(
        row,
        following.status,
        following.reason,
        f"attempt {row.attempt} does not count, nothing was sent: {error}" if held else summary,
        due_at=_due(following, now=now),
        error=error,
        receipt=row.receipt if each.receipt is None else safe_error(each.receipt, PAYLOAD_BYTES_MAX),
        on_failure=each.policy.on_failure,
        blocks=each.policy.on_dead == "block",
        attempt=row.attempt - 1 if held else row.attempt,
        # A deployment costs no attempt: this one counts, and one more is allowed.
        max_attempts=attempts_max + 1 if each.result == "cut_short" else row.max_attempts,
    )


def released(row: moves.Standing, *, now: int) -> moves.Move:
    """The move that gives a claim back of which nothing had begun: as if the attempt had not been."""
    return moves.move(
        row,
        Status.PENDING,
        Reason.RELEASED,
        f"attempt {row.attempt} given back, nothing had begun",
        due_at=now,
        attempt=row.attempt - 1,
        first_attempt_at=None if row.attempt == 1 else row.first_attempt_at,
    )


def _late(row: moves.Standing, each: Settlement) -> moves.Move:
    """What an attempt did after its claim was over."""
    summary, _ = _said(f"attempt {each.attempt} {_SAID[each.result]} after its claim was over", each)
    return moves.move(
        row,
        row.status,
        _late_reason(each),
        summary,
        late=True,
        attempt=each.attempt,
        epoch=row.epoch if each.epoch is None else each.epoch,
        error=None,
        # What asked for an acknowledgement ends by that, or by none having come.
        told=Status.DELIVERED if each.result == "ok" and not row.ack_required else None,
        on_failure=each.policy.on_failure,
    )


def _late_reason(each: Settlement) -> Reason:
    if each.unsent:
        return Reason.STALE_UNSENT
    return Reason.STALE_OK if each.result == "ok" else Reason.STALE_FAILED


def _said(what: str, each: Settlement) -> tuple[str, str | None]:
    """The history's summary and the error's text; a success has none."""
    if each.result == "ok":
        return what, None
    error = safe_error(each.error)
    return (f"{what}: {error}" if error else what), error


def _due(following: Next, *, now: int) -> int | None:
    return None if following.delay is None else now + following.delay


def expire(conn: Connection, *, limit: int, now: int) -> int:
    """End at most `limit` dispatches of any kind whose deadline has passed, oldest first; their number."""
    dialects.distrust_statistics(conn)
    rows = moves.endable(conn, _OVERDUE(conn, limit=limit, now=now).into(moves.Standing))
    moves.apply(conn, [overdue(row) for row in rows], now=now)
    return len(rows)


def overdue(row: moves.Standing) -> moves.Move:
    """The move that ends a dispatch whose deadline has passed."""
    return moves.move(row, Status.EXPIRED, Reason.DEADLINE, f"its deadline passed after {row.attempt} attempts")
