"""The life of a dispatch, a turn's run, a queue and a timer, as data. Docs draw their diagrams from here."""

from enum import StrEnum
from typing import Literal

import msgspec

from postroad.model.errors import IllegalEdge
from postroad.model.retry import Retry


class Status(StrEnum):
    """Where a dispatch stands."""

    PENDING = "pending"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    ACKED = "acked"
    DEAD_LETTER = "dead_letter"
    EXPIRED = "expired"


class Reason(StrEnum):
    """Why a dispatch changed its status."""

    ENQUEUED = "dispatch.pending.enqueued"
    RETRY_BACKOFF = "dispatch.pending.retry_backoff"
    RELEASED = "dispatch.pending.released"
    HELD = "dispatch.pending.held"
    OPERATOR_RETRY = "dispatch.pending.operator_retry"
    ATTEMPT = "dispatch.delivering.attempt"
    TRANSPORT_OK = "dispatch.delivered.transport_ok"
    ACKED = "dispatch.acked.consumer"
    MAX_ATTEMPTS = "dispatch.dead_letter.max_attempts"
    PERMANENT = "dispatch.dead_letter.permanent"
    BUDGET = "dispatch.dead_letter.budget"
    UNKNOWN_OUTCOME = "dispatch.dead_letter.unknown_outcome"
    LEASE_LOST = "dispatch.dead_letter.lease_lost"
    ACK_TIMEOUT = "dispatch.dead_letter.ack_timeout"
    DEADLINE = "dispatch.expired.deadline"
    WITHDRAWN = "dispatch.expired.withdrawn"
    # What a claimant did after its claim was over: history only, the status stays.
    STALE_OK = "dispatch.stale.transport_ok"
    STALE_FAILED = "dispatch.stale.transport_failed"
    STALE_UNSENT = "dispatch.stale.unsent"
    # What a person found out about a dead letter that may have arrived: an audited word, the status stays.
    RESOLVED_SENT = "dispatch.resolved.sent"
    RESOLVED_DISCARDED = "dispatch.resolved.discarded"


P, D = Status.PENDING, Status.DELIVERING

# From (None: not there yet) -> to. The only edges there are; the last two are an operator's alone.
EDGES: frozenset[tuple[Status | None, Status]] = frozenset(
    {
        (None, P),
        (P, D),
        (P, Status.EXPIRED),
        (P, Status.ACKED),
        (D, D),
        (D, P),
        (D, Status.DELIVERED),
        (D, Status.ACKED),
        (D, Status.DEAD_LETTER),
        (D, Status.EXPIRED),
        (Status.DEAD_LETTER, P),
        (Status.EXPIRED, P),
    }
)
TERMINAL = frozenset({Status.DELIVERED, Status.ACKED, Status.DEAD_LETTER, Status.EXPIRED})


def check_edge(before: Status | None, after: Status) -> None:
    """Raise IllegalEdge unless a dispatch may go from `before` to `after`."""
    if (before, after) not in EDGES:
        raise IllegalEdge(f"{before} -> {after}", before=before, after=after)


class RunEnd(StrEnum):
    """How one attempt at a turn ended."""

    COMMITTED = "committed"
    CONFLICT = "conflict"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    STALE = "stale"
    RELEASED = "released"
    STOPPED = "stopped"


class QueueState(StrEnum):
    """Why a stream has a queues row: claimed, waiting after a failure, waiting for a person, or freed."""

    CLAIMED = "claimed"
    BACKOFF = "backoff"
    PARKED = "parked"
    READY = "ready"


class TimerStatus(StrEnum):
    """Where a timer stands."""

    ARMED = "armed"
    FIRED = "fired"
    CANCELLED = "cancelled"


# cut_short: we ended the attempt ourselves, because the process was told to end. unreachable: nothing was sent.
Result = Literal["ok", "failed", "permanent", "unknown", "cut_short", "unreachable"]


class Next(msgspec.Struct, frozen=True):
    """Where a dispatch goes after an attempt, why, and how long until it is due again (microseconds)."""

    status: Status
    reason: Reason
    delay: int | None = None


def after_attempt(
    result: Result,
    retry: Retry,
    *,
    attempt: int,
    attempts_max: int,
    first_attempt_at: int,
    now: int,
    fraction: float,
    floor: int = 0,
    ack: bool = False,
    patience: int = 0,
) -> Next:
    """What an attempt's result makes of its dispatch.

    `attempt` counts from 1 and includes this one; `fraction` is the jitter's draw; `floor` a Retry-After in
    microseconds. Both bounds hold, attempts and budget, whichever ends first. `ack`: what was sent waits for its
    acknowledgement, after the last attempt too, for the whole delay; the next claim then sees to the bounds. What
    could not reach its destination costs no attempt until that has gone on for `patience` (microseconds).
    """
    if result == "ok" and ack:
        return Next(Status.PENDING, Reason.TRANSPORT_OK, retry.bound(attempt))
    if result == "ok":
        return Next(Status.DELIVERED, Reason.TRANSPORT_OK)
    if result == "cut_short":
        return Next(Status.PENDING, Reason.RELEASED, 0)
    if result == "permanent":
        return Next(Status.DEAD_LETTER, Reason.PERMANENT)
    if result == "unknown":
        return Next(Status.DEAD_LETTER, Reason.UNKNOWN_OUTCOME)
    if result == "unreachable" and now - first_attempt_at < patience:
        return Next(Status.PENDING, Reason.HELD, 0)
    if attempt >= attempts_max:
        return Next(Status.DEAD_LETTER, Reason.MAX_ATTEMPTS)
    delay = retry.delay(attempt, fraction, floor)
    if budget_spent(retry.budget, attempt=attempt, first_attempt_at=first_attempt_at, start=now + delay):
        return Next(Status.DEAD_LETTER, Reason.BUDGET)
    return Next(Status.PENDING, Reason.RETRY_BACKOFF, delay)


def budget_spent(budget: int | None, *, attempt: int, first_attempt_at: int | None, start: int) -> bool:
    """Whether a start after `attempt` attempts would lie beyond the budget; the first retry never does."""
    if budget is None or first_attempt_at is None or attempt <= 1:
        return False
    return start > first_attempt_at + budget
