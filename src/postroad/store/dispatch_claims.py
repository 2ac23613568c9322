"""Claims of dispatches: who may send what now, and what is ended because it may be sent no more."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model.failpoints import failpoint
from postroad.model.gates import WHOLE_KIND
from postroad.model.lifecycle import Reason, Status, budget_spent
from postroad.model.rows import (
    ClaimedDispatches,
    DispatchClaim,
    Hold,
    HostRoom,
    NewTransition,
    SendPolicy,
    Settled,
)
from postroad.store import dialects, gates, moves, ready, settle, transitions
from postroad.store.ready import Due
from postroad.store.statements import Statement, as_json

# "Unfinished" is said as the index says it: SQLite uses a partial index for nothing else. A claim whose lease
# is over is due like any other. A scalar subquery: EXISTS may be planned as a join that reads all of it.
_HEADS = Statement("""
SELECT value AS kind, head FROM (
    SELECT value, (
        SELECT o.due_at FROM {p}outbox AS o
        WHERE o.kind = value AND o.status IN ('pending', 'delivering') AND o.due_at <= :now
        AND (:takeover = 1 OR o.status = 'pending')
        ORDER BY o.due_at LIMIT 1
    ) AS head FROM {list:kinds}
) AS heads WHERE head IS NOT NULL ORDER BY head
""")

_UPDATE = """
UPDATE {p}outbox
SET status = 'delivering', attempt = attempt + 1, claim_token = :token, due_at = :until,
    first_attempt_at = coalesce(first_attempt_at, :now), max_attempts = coalesce(max_attempts, :attempts_max),
    updated_at = :now
WHERE id {in_list:ids}
"""
_CLAIM = Statement(_UPDATE)
# Postgres takes both as one statement: each round trip is a tenth of the time from a commit to its send.
_CLAIM_AND_RECORD = Statement(f"WITH claimed AS ({_UPDATE}) {transitions.INSERT}")

_CURRENT = Statement("""
SELECT o.id FROM {rows:holds(subject text, token text)}
JOIN {p}outbox AS o ON o.id = holds.subject AND o.claim_token = holds.token AND o.due_at > :now
ORDER BY holds.ord
""")

_BY_TOKEN = Statement(
    "SELECT " + ready.COLUMNS + ", NULL AS unseen, " + gates.PROBED + " FROM {p}outbox AS o "
    "WHERE o.status IN ('pending', 'delivering') AND o.due_at IS NOT NULL AND o.claim_token = :token "
    "ORDER BY o.due_at, o.id"
)


def due_kinds(conn: Connection, kinds: Sequence[str], *, takeover: bool, now: int) -> list[str]:
    """Which of these kinds have anything to claim, the one that has waited longest first.

    Without `takeover`, claims whose lease is over don't count.
    """
    return [kind for kind, _ in _heads(conn, kinds, takeover=takeover, now=now)]


def _heads(conn: Connection, kinds: Sequence[str], *, takeover: bool, now: int) -> list[tuple[str, int]]:
    dialects.distrust_statistics(conn)
    listed = as_json(kinds)
    return [(row.kind, row.head) for row in _HEADS(conn, kinds=listed, takeover=int(takeover), now=now)]


def claim(
    conn: Connection,
    policy: SendPolicy,
    *,
    names: Sequence[str],
    token: str,
    limit: int,
    room: HostRoom | None = None,
    takeover: bool = True,
    now: int,
) -> ClaimedDispatches:
    """Claim at most `limit` due dispatches of a kind, stored under any of its `names`, oldest due time first.

    Where a gate, a rate or the `room` of a host holds some back, the oldest of each host come first. Those that were
    written in a newer version of the kind than the policy's are left to newer code.

    The claim is the start of an attempt and is counted. What may be sent no more is ended instead, with
    outcome and alert, and counts towards the limit: its deadline has passed, its last attempt's lease was
    lost or has waited in vain for an acknowledgement, or its budget is spent. `takeover` False leaves claims
    alone whose lease is over.
    """
    dialects.distrust_statistics(conn)
    # Of several names the one that has waited longest comes first: none starves.
    names = due_kinds(conn, names, takeover=takeover, now=now) if len(names) > 1 else names
    found = ready.find(conn, policy, names, limit, room=room, takeover=takeover, now=now)
    rows = found.rows
    failpoint("dispatch.selected")
    unseen = any(row.unseen for row in rows)
    over = {row.id: move for row in rows if (move := _end(row, policy, now=now)) is not None}
    ended = [over[row.id] for row in moves.endable(conn, [row for row in rows if row.id in over])]
    left = [row for row in rows if row.id not in over]
    claimed, probes = _probes(conn, left, found.closed, policy, token=token, now=now)
    moves.apply(conn, ended, now=now)
    again_at = found.start(claimed)
    if claimed:
        _start(conn, claimed, policy, token=token, now=now)
    return ClaimedDispatches(
        [_started(row, policy, token=token, probe=row.id in probes, now=now) for row in claimed],
        [Settled(move.row.id, move.to, move.reason, False) for move in ended],
        unseen,
        again_at,
    )


def _probes(
    conn: Connection, rows: Sequence[Due], closed: frozenset[str], policy: SendPolicy, *, token: str, now: int
) -> tuple[list[Due], set[str]]:
    """Those of these rows that may be sent, and the ids of those that are probes: they have taken their gates."""
    if not closed:
        return list(rows), set()
    sent: list[Due] = []
    probes: set[str] = set()
    for row in rows:
        concerned = {WHOLE_KIND, row.host or WHOLE_KIND} & closed
        if not concerned:
            sent.append(row)
        elif gates.take(conn, policy.kind, sorted(concerned), token=token, until=now + policy.lease, now=now):
            sent.append(row)
            probes.add(row.id)
    return sent, probes


def _end(row: Due, policy: SendPolicy, *, now: int) -> moves.Move | None:
    """The move that ends a due dispatch which may be sent no more; None: send it."""
    lost = row.status is Status.DELIVERING
    attempts_max = row.max_attempts or policy.retry.attempts
    gone = f"the lease of attempt {row.attempt} of {attempts_max} was lost"
    spent = budget_spent(policy.retry.budget, attempt=row.attempt, first_attempt_at=row.first_attempt_at, start=now)
    if row.expires_at is not None and row.expires_at <= now:
        return msgspec.structs.replace(settle.overdue(row), on_failure=policy.on_failure)
    if lost and row.attempt >= attempts_max:
        return _die(row, policy, Reason.LEASE_LOST, gone, error=gone)
    if lost and policy.park_unknown:
        return _die(row, policy, Reason.UNKNOWN_OUTCOME, f"{gone}; it may have arrived", error=gone)
    if row.ack_required and not lost and row.attempt >= attempts_max:
        said = f"attempt {row.attempt} of {attempts_max} was the last one"
        return _die(row, policy, Reason.ACK_TIMEOUT, said, error="no acknowledgement came")
    if spent:
        said = f"attempt {row.attempt + 1} would start after the budget"
        return _die(row, policy, Reason.BUDGET, f"{gone}; {said}" if lost else said, error=row.last_error)
    return None


def _die(row: Due, policy: SendPolicy, reason: Reason, summary: str, *, error: str | None) -> moves.Move:
    about: dict[str, Any] = {"on_failure": policy.on_failure, "blocks": policy.on_dead == "block"}
    return moves.move(row, Status.DEAD_LETTER, reason, summary, error=error, **about)


def _start(conn: Connection, rows: Sequence[Due], policy: SendPolicy, *, token: str, now: int) -> None:
    """Start an attempt of each of these rows."""
    history = [_history(row, policy) for row in rows]
    claim = {
        "ids": as_json([row.id for row in rows]),
        "token": token,
        "until": now + policy.lease,
        "attempts_max": policy.retry.attempts,
        "now": now,
    }
    if conn.dialect.name == "postgresql":
        transitions.check(history)
        _CLAIM_AND_RECORD.for_rows(conn, history, **claim)
        failpoint("dispatch.claimed")
    else:
        _CLAIM(conn, **claim)
        failpoint("dispatch.claimed")
        transitions.record(conn, history, now=now)


def _history(row: Due, policy: SendPolicy) -> NewTransition:
    lost = f"; the lease of attempt {row.attempt} was lost" if row.status is Status.DELIVERING else ""
    return NewTransition(
        entity=row.id,
        from_status=row.status,
        to_status=Status.DELIVERING,
        reason_code=Reason.ATTEMPT,
        summary=f"attempt {row.attempt + 1} of {row.max_attempts or policy.retry.attempts}{lost}",
        metadata=transitions.about(row.attempt + 1, row.epoch),
    )


def _started(row: Due, policy: SendPolicy, *, token: str, probe: bool, now: int) -> DispatchClaim:
    """The claim of a row, as `_CLAIM` has left it."""
    return _claim(
        row,
        attempt=row.attempt + 1,
        max_attempts=row.max_attempts or policy.retry.attempts,
        token=token,
        until=now + policy.lease,
        first_attempt_at=now if row.first_attempt_at is None else row.first_attempt_at,
        probe=probe,
    )


def _standing(row: Due) -> DispatchClaim:
    """The claim that a claimed row stands for: its CHECK and the claim itself have set all these fields."""
    assert row.claim_token is not None
    assert row.due_at is not None
    assert row.max_attempts is not None
    assert row.first_attempt_at is not None
    return _claim(
        row,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        token=row.claim_token,
        until=row.due_at,
        first_attempt_at=row.first_attempt_at,
        probe=row.probed is not None,
    )


def _claim(
    row: Due, *, attempt: int, max_attempts: int, token: str, until: int, first_attempt_at: int, probe: bool
) -> DispatchClaim:
    return DispatchClaim(
        id=row.id,
        key=row.key,
        stream=row.stream,
        kind=row.kind,
        version=row.version,
        destination=row.destination,
        body=row.body,
        headers=row.headers,
        origin=row.origin,
        attempt=attempt,
        max_attempts=max_attempts,
        epoch=row.epoch,
        token=token,
        until=until,
        created_at=row.created_at,
        first_attempt_at=first_attempt_at,
        expires_at=row.expires_at,
        possible_duplicate=attempt > 1 or row.epoch > 0,
        lane=row.lane,
        ack_required=bool(row.ack_required),
        host=row.host,
        probe=probe,
    )


def release(conn: Connection, holds: Sequence[Hold], *, kind: str | None = None, now: int) -> list[str]:
    """Give claims back of which nothing had begun, as if they had not been; the ids that were still held.

    Gates for which they were to be the probes may be tried by others at once: those of `kind`, by its name of today;
    None: of the kinds under whose names these are stored.
    """
    standing = moves.lock(conn, [hold.subject for hold in holds], in_lanes=())  # none of them ends
    held = {
        hold.subject: standing[hold.subject]
        for hold in holds
        if hold.subject in standing and standing[hold.subject].claim_token == hold.token
    }
    moves.apply(conn, [settle.released(row, now=now) for row in held.values()], now=now)
    for name in sorted({row.kind if kind is None else kind for row in held.values()}):
        given = [hold for hold in holds if hold.subject in held and name in (kind, held[hold.subject].kind)]
        gates.release(conn, name, given, now=now)
    return list(held)


def recheck(conn: Connection, holds: Sequence[Hold], *, now: int) -> list[str]:
    """The ids of those claims that are still held and whose lease is not over, in the given order."""
    return list(_CURRENT(conn, holds=as_json(holds), now=now).scalars())


def lookup(conn: Connection, token: str) -> list[DispatchClaim]:
    """What was claimed under a token, for a claimant that lost the answer to its COMMIT."""
    return [_standing(row) for row in _BY_TOKEN(conn, token=token).into(Due)]
