"""How a dispatch goes from one status to the next: row, outcome, history and alert, all at once."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.errors import StaleClaim
from postroad.model.events import OUTCOME_NAME, Outcome
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import TERMINAL, Reason, Status, check_edge
from postroad.model.rows import NewAlert, NewEvent, NewTransition
from postroad.store import alerts, inbox, transitions
from postroad.store.statements import Statement, as_json

COLUMNS = (
    "o.id, o.key, o.stream, o.kind, o.destination, o.policy, o.status, o.attempt, o.max_attempts, o.epoch, "
    "o.due_at, o.first_attempt_at, o.claim_token, o.expires_at, o.last_error, o.receipt"
)
NO_ATTEMPT = "claimed to be ended, no attempt"
_ALERTING = frozenset({Status.DEAD_LETTER, Status.EXPIRED})

# Ordered, so that two groups of settlements never wait for each other in a circle.
_LOCK = Statement("SELECT " + COLUMNS + " FROM {p}outbox AS o WHERE o.id {in_list:ids} ORDER BY o.id {for_update}")

# The rows are locked; status and token are compared all the same, so that no caller's mistake goes by unseen.
_UPDATE = Statement("""
UPDATE {p}outbox AS o
SET status = moves.status, due_at = moves.due_at, attempt = moves.attempt,
    first_attempt_at = moves.first_attempt_at, max_attempts = moves.max_attempts,
    last_error = moves.last_error, receipt = moves.receipt,
    claim_token = NULL, updated_at = :now
FROM {rows:moves(id text, status text, due_at int, attempt int, first_attempt_at int,
                 max_attempts int, last_error text, receipt text, was text, token text)}
WHERE o.id = moves.id AND o.id {in_list:ids} AND o.status = moves.was AND o.claim_token IS NOT DISTINCT FROM moves.token
""")

# Of two outcomes with one id the first stays, whatever the error or receipt of the second; whoever publishes
# the outcomes of one dispatch holds its row, so that none can come in between.
_PLACES = Statement("""
SELECT told.stream, told.event_id,
    (SELECT s.deleted_at FROM {p}streams AS s WHERE s.id = told.stream) IS NOT NULL AS deleted,
    (SELECT i.position FROM {p}inbox AS i WHERE i.stream = told.stream AND i.event_id = told.event_id)
        IS NOT NULL AS waits,
    (SELECT l.seq FROM {p}log AS l WHERE l.stream = told.stream AND l.entry_id = told.event_id)
        IS NOT NULL AS landed
FROM {rows:told(stream text, event_id text)}
""")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a dispatch stands: its row, locked by this transaction."""

    id: str
    key: str
    stream: str
    kind: str
    destination: str
    policy: Literal["event", "alert"]
    status: Status
    attempt: int
    max_attempts: int | None
    epoch: int
    due_at: int | None
    first_attempt_at: int | None
    claim_token: str | None
    expires_at: int | None
    last_error: str | None
    receipt: str | None


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a dispatch, or (`late`) a word on it that changes nothing: only history.

    `due_at` None: it is finished, or waits for something else than time. `error` and `receipt` are what the
    row holds from now on. `told`: the outcome that its stream gets, if there is a stream.
    """

    row: Standing
    to: Status
    reason: Reason
    summary: str
    attempt: int
    first_attempt_at: int | None
    max_attempts: int | None
    due_at: int | None = None
    error: str | None = None
    receipt: str | None = None
    on_failure: Literal["event", "alert"] = "event"
    source: str = "system"
    actor: str = ""
    late: bool = False
    told: Status | None = None
    epoch: int

    @property
    def alerts(self) -> bool:
        """Whether a person must know: it died, and no stream handles that (or operators asked for it)."""
        died = self.to in _ALERTING and self.reason is not Reason.WITHDRAWN and not self.late
        return died and (self.on_failure == "alert" or not self.row.stream)


def lock(conn: Connection, dispatches: Sequence[str]) -> dict[str, Standing]:
    """Lock these dispatches' rows, ordered by id, and say where they stand; an unknown id is left out."""
    return {row.id: row for row in _LOCK(conn, ids=as_json(dispatches)).into(Standing)}


def move(row: Standing, to: Status, reason: Reason, summary: str, **changes: Any) -> Move:
    """A move that keeps what it is not told to change; the end of a dispatch is told to its stream."""
    kept = {
        "attempt": row.attempt,
        "first_attempt_at": row.first_attempt_at,
        "max_attempts": row.max_attempts,
        "error": row.last_error,
        "receipt": row.receipt,
        "on_failure": row.policy,
        "epoch": row.epoch,
        "told": to if to in TERMINAL else None,
    }
    return Move(row=row, to=to, reason=reason, summary=summary, **{**kept, **changes})


def apply(conn: Connection, moves: Sequence[Move], *, now: int) -> None:
    """Make these moves: rows, outcomes into the streams' inboxes, history, alerts.

    The rows must have been locked by this transaction.

    Raises:
        IllegalEdge: There is no such edge; nothing was written.
        StaleClaim: A row is not what the move says it is; the transaction must not be committed.
    """
    if not moves:
        return
    for each in moves:
        for before, after in _edges(each):
            check_edge(before, after)
    _write(conn, [each for each in moves if not each.late], now=now)
    failpoint("moves.written")
    dropped = _tell(conn, [each for each in moves if each.told and each.row.stream], now=now)
    failpoint("moves.told")
    history = [_history(each, dropped=bool(each.told) and each.row.stream in dropped) for each in moves]
    transitions.record(conn, [row for rows in history for row in rows], now=now)
    failpoint("moves.recorded")
    alerts.raise_alerts(conn, [_alert(each) for each in moves if each.alerts], now=now)


def _edges(each: Move) -> list[tuple[Status, Status]]:
    """The edges it takes: one from pending to dead_letter there is not, so that goes through delivering."""
    if each.late:
        return []
    if each.row.status is Status.PENDING and each.to is Status.DEAD_LETTER:
        return [(Status.PENDING, Status.DELIVERING), (Status.DELIVERING, Status.DEAD_LETTER)]
    return [(each.row.status, each.to)]


def _write(conn: Connection, moves: Sequence[Move], *, now: int) -> None:
    if not moves:
        return
    rows = [
        {
            "id": each.row.id,
            "status": each.to,
            "due_at": each.due_at,
            "attempt": each.attempt,
            "first_attempt_at": each.first_attempt_at,
            "max_attempts": each.max_attempts,
            "last_error": each.error,
            "receipt": each.receipt,
            "was": each.row.status,
            "token": each.row.claim_token,
        }
        for each in moves
    ]
    ids = [row["id"] for row in rows]
    written = _UPDATE(conn, moves=as_json(rows), ids=as_json(ids), now=now).rowcount
    if written != len(moves):
        raise StaleClaim(f"{len(moves) - written} of {len(moves)} dispatches had moved on.")


def _tell(conn: Connection, moves: Sequence[Move], *, now: int) -> frozenset[str]:
    """Publish outcomes; the streams among theirs that were deleted, whose outcomes are dropped."""
    if not moves:
        return frozenset()
    told: dict[tuple[str, str], NewEvent] = {}
    for event in map(_outcome, moves):
        told.setdefault((event.stream, event.event_id), event)
    asked = [{"stream": stream, "event_id": event_id} for stream, event_id in told]
    places = _PLACES(conn, told=as_json(asked)).all()
    new = [told[p.stream, p.event_id] for p in places if not (p.deleted or p.waits or p.landed)]
    if new:
        inbox.add(conn, new, now=now)
    return frozenset(place.stream for place in places if place.deleted)


def _outcome(each: Move) -> NewEvent:
    row, status = each.row, each.told or each.to
    outcome = Outcome(
        dispatch=row.id,
        key=row.key,
        kind=row.kind,
        status=status,
        reason=each.reason,
        error=each.error,
        on_failure=each.on_failure,
    )
    return NewEvent(
        stream=row.stream,
        event_id=ids.outcome_id(row.key, each.epoch, status),
        kind=OUTCOME_NAME,
        data=as_json(outcome),
    )


def _history(each: Move, *, dropped: bool) -> list[NewTransition]:
    about: dict[str, Any] = {"attempt": each.attempt if each.late else each.row.attempt, "epoch": each.epoch}
    if dropped:
        about["outcome"] = "dropped: the stream was deleted"
    return [
        NewTransition(
            entity=each.row.id,
            from_status=before,
            to_status=after,
            reason_code=each.reason if after is each.to else Reason.ATTEMPT,
            summary=each.summary if after is each.to else NO_ATTEMPT,
            source=each.source,
            actor=each.actor,
            metadata=as_json(about),
        )
        for before, after in _edges(each) or [(each.row.status, each.row.status)]
    ]


def _alert(each: Move) -> NewAlert:
    said = f": {each.error}" if each.error else ""
    return NewAlert(
        severity="error" if each.to is Status.DEAD_LETTER else "warning",
        code=f"dispatch.{each.to}",
        subject=each.row.key,
        detail=f"{each.row.kind} to {each.row.destination or '(nowhere)'} ended, {each.reason}{said}",
    )
