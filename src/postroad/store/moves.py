"""How a dispatch goes from one status to the next: row, outcome, history and alert, all at once."""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.errors import StaleClaim
from postroad.model.events import OUTCOME_NAME, Outcome
from postroad.model.failpoints import failpoint
from postroad.model.gates import host_of
from postroad.model.lifecycle import TERMINAL, Reason, Status, check_edge
from postroad.model.rows import NewAlert, NewEvent, NewTransition
from postroad.store import alerts, inbox, lanes, transitions
from postroad.store.statements import Statement, as_json

COLUMNS = (
    "o.id, o.key, o.stream, o.kind, o.destination, o.policy, o.status, o.attempt, o.max_attempts, o.epoch, "
    "o.due_at, o.first_attempt_at, o.claim_token, o.expires_at, o.last_error, o.receipt, o.lane, o.ack_required"
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
WHERE {match:o.id=moves.id} AND o.status = moves.was
    AND o.claim_token IS NOT DISTINCT FROM moves.token
""")

# Of two outcomes with one id the first stays, whatever the error or receipt of the second; whoever publishes
# the outcomes of one dispatch holds its row, so that none can come in between.
_PLACES = Statement("""
SELECT told.stream AS stream, told.event_id AS event_id,
    (SELECT s.deleted_at FROM {p}streams AS s WHERE s.id = told.stream) IS NOT NULL AS deleted,
    (SELECT i.position FROM {p}inbox AS i WHERE i.stream = told.stream AND i.event_id = told.event_id)
        IS NOT NULL AS waits,
    (SELECT l.seq FROM {p}log AS l WHERE l.stream = told.stream AND l.entry_id = told.event_id)
        IS NOT NULL AS landed
FROM {rows:told(stream text, event_id text)}
""")

_SENT = Statement("""
SELECT DISTINCT entity FROM {p}transitions
WHERE entity {in_list:ids} AND reason_code IN ('dispatch.delivered.transport_ok', 'dispatch.stale.transport_ok')
""")


class Standing(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
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
    lane: str | None = None
    ack_required: int = 0


S = TypeVar("S", bound=Standing)


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a dispatch, or (`late`) a word on it that changes nothing: only history.

    `due_at` None: it is finished, or waits for something else than time. `error` and `receipt` are what the
    row holds from now on. `told`: the outcome that its stream gets, if there is a stream. `blocks`: as a dead letter
    it holds up its lane.
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
    blocks: bool = False

    @property
    def leaves_its_lane(self) -> bool:
        """Whether the next one of its lane may go: this one is finished, or a person has decided about it."""
        if self.late:
            return self.reason in transitions.RESOLVED
        return self.to in TERMINAL and not (self.blocks and self.to is Status.DEAD_LETTER)

    @property
    def alerts(self) -> bool:
        """Whether a person must know: it died, and no stream handles that (or operators asked for it)."""
        died = self.to in _ALERTING and self.reason is not Reason.WITHDRAWN and not self.late
        return died and (self.on_failure == "alert" or not self.row.stream)


def lock(conn: Connection, dispatches: Sequence[str], *, in_lanes: Sequence[str] | None = None) -> dict[str, Standing]:
    """Lock these dispatches' rows, ordered by id, and say where they stand; an unknown id is left out.

    Their lanes are locked before them; `in_lanes` are these, where the caller knows them.
    """
    if in_lanes is None:
        lanes.lock_of(conn, dispatches)
    elif in_lanes:
        lanes.lock(conn, in_lanes)
    return {row.id: row for row in _LOCK(conn, ids=as_json(dispatches)).into(Standing)}


def endable(conn: Connection, rows: Sequence[S]) -> list[S]:
    """Of rows that are locked already those that may be ended now: their lanes are locked, if nobody holds these.

    The others are left to the next time: a row is never locked before its lane by who waits.
    """
    named = {row.lane for row in rows if row.lane is not None}
    held = lanes.try_lock(conn, named) if named else frozenset[str]()
    return [row for row in rows if row.lane is None or row.lane in held]


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
    """Make these moves: rows, lanes, outcomes into the streams' inboxes, history, alerts.

    The rows and the lanes of those that end must have been locked by this transaction.

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
    lanes.leave(
        conn, [(each.row.lane, each.row.id) for each in moves if each.row.lane and each.leaves_its_lane], now=now
    )
    failpoint("moves.written")
    dropped = _tell(conn, [each for each in moves if each.told and each.row.stream], now=now)
    failpoint("moves.told")
    history = [
        _history(each, dropped=bool(each.told) and each.row.stream in dropped)
        for each in _with_what_was_sent(conn, moves)
    ]
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
    written = _UPDATE.for_rows(conn, rows, now=now).rowcount
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
    places = _PLACES.for_rows(conn, asked).all()
    new = [told[p.stream, p.event_id] for p in places if not (p.deleted or p.waits or p.landed)]
    if new:
        inbox.add(conn, new, now=now)
    return frozenset(place.stream for place in places if place.deleted)


def _with_what_was_sent(conn: Connection, moves: Sequence[Move]) -> Sequence[Move]:
    """These moves; one that ends without the acknowledgement that was asked for says whether anything was sent."""
    asked = [each.row.id for each in moves if each.row.ack_required and each.to in _ALERTING and not each.late]
    sent = set(_SENT(conn, ids=as_json(asked)).scalars()) if asked else set[str]()
    if not sent:
        return moves
    said = "; it had been sent, but not acknowledged"
    return [
        msgspec.structs.replace(each, summary=each.summary + said) if each.row.id in sent and not each.late else each
        for each in moves
    ]


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
    attempt = each.attempt if each.late else each.row.attempt
    about = transitions.about(attempt, each.epoch)
    if dropped:
        told = {"attempt": attempt, "epoch": each.epoch, "outcome": "dropped: the stream was deleted"}
        about = as_json(told)
    return [
        NewTransition(
            entity=each.row.id,
            from_status=before,
            to_status=after,
            reason_code=each.reason if after is each.to else Reason.ATTEMPT,
            summary=each.summary if after is each.to else NO_ATTEMPT,
            source=each.source,
            actor=each.actor,
            metadata=about,
        )
        for before, after in _edges(each) or [(each.row.status, each.row.status)]
    ]


def _alert(each: Move) -> NewAlert:
    said = f": {each.error}" if each.error else ""
    # Alerts go to logs: of a URL only its host, since its path or query may be a secret.
    where = host_of(each.row.destination) or each.row.destination or "(nowhere)"
    return NewAlert(
        severity="error" if each.to is Status.DEAD_LETTER else "warning",
        code=f"dispatch.{each.to}",
        subject=each.row.key,
        detail=f"{each.row.kind} to {where} ended, {each.reason}{said}",
    )
