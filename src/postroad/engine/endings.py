"""The commits of turns that end without a decision: answered by a filter, given up, or stopped."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from postroad.model import events
from postroad.model.delegations import OVERDUE, DelegationEnd, DelegationStatus, Task
from postroad.model.lifecycle import RunEnd
from postroad.model.operations import Operation
from postroad.model.payload import safe_error
from postroad.model.rows import InboxEvent, NewAlert, NewEntry, TurnClaim, TurnCommit

DETAIL_CHARS_MAX = 2_000
OPERATIONS_MAX = 100
STOPPED = "turn.stopped"
_ALWAYS_RECORDED = frozenset({events.OUTCOME_NAME, events.REPORT_NAME})


def noop_entries(claim: TurnClaim, reasons: Mapping[str, str]) -> list[NewEntry]:
    """One `postroad.noop` entry for each event that needed no decision."""
    return [
        _entry(claim, events.NOOP, event_id, events.Noop(event=event_id, reason=reason))
        for event_id, reason in reasons.items()
    ]


def answer(claim: TurnClaim, consumed: list[InboxEvent], reasons: Mapping[str, str]) -> TurnCommit:
    """The commit that answers events of a set without a decision: the events, then a noop for each reason."""
    return TurnCommit(
        claim=claim,
        consumed=consumed,
        entries=noop_entries(claim, reasons),
        finished=refused_tasks(consumed, reasons),
    )


def refused_tasks(consumed: Sequence[InboxEvent], reasons: Mapping[str, str]) -> list[DelegationEnd]:
    """The ends of the tasks that were answered without a decision: nobody works at them."""
    return [
        end
        for event in consumed
        if (why := reasons.get(event.event_id))
        for end in _tasks([event], why, DelegationStatus.TIMED_OUT if why == OVERDUE else DelegationStatus.FAILED)
    ]


def _tasks(
    given: Sequence[InboxEvent], why: str, status: DelegationStatus = DelegationStatus.FAILED
) -> list[DelegationEnd]:  # fmt: skip
    """The ends of the tasks among these events."""
    tasks = [msgspec.json.decode(event.data, type=Task) for event in given if event.kind == events.TASK_NAME]
    return [DelegationEnd(stream=task.parent, key=task.key, status=status, error=safe_error(why)) for task in tasks]


def failure(claim: TurnClaim, *, reason: str, error: str, operations: Sequence[Operation] = ()) -> NewEntry:
    """The visible entry of a set that ended without a decision."""
    failed = events.Failure(events=_ids(claim), reason=reason, error=error, operations=_noted(operations))
    return _entry(claim, events.FAILED, claim.turn_id, failed)


def bury(claim: TurnClaim, *, reason: str, error: str) -> TurnCommit:
    """The commit of a set that is given up: outcomes and reports are recorded, the rest goes dead, with an alert."""
    kept = [e for e in claim.events if e.kind in _ALWAYS_RECORDED]
    return TurnCommit(
        claim=claim,
        consumed=kept,
        dead=[e for e in claim.events if e.kind not in _ALWAYS_RECORDED],
        dead_reason=reason,
        entries=[failure(claim, reason=reason, error=error)],
        alerts=[_alert("turn.dead", claim, f"{reason}: {error}")],
        finished=_tasks(claim.events, f"{reason}: {error}"),
        end=RunEnd.FAILED,
        error=error,
    )


def duplicate_key(claim: TurnClaim, key: str, operations: Sequence[Operation] = ()) -> TurnCommit:
    """The commit of a decision whose dispatch key exists and that nothing replaced: visible, with an alert."""
    said = f"dispatch key {key!r} exists already"
    return TurnCommit(
        claim=claim,
        consumed=claim.events,
        entries=[failure(claim, reason="turn.failed.duplicate_key", error=said, operations=operations)],
        alerts=[_alert("turn.duplicate_key", claim, said)],
        finished=_tasks(claim.events, said),
        end=RunEnd.FAILED,
        error=said,
    )


def interrupted(claim: TurnClaim, *, reason: str, error: str, operations: Sequence[Operation]) -> TurnCommit:
    """The commit of a turn that must not be run again, or that a person stopped: its events are consumed.

    The entry says what is known of what it did; unless a person asked for it, an alert says that it is there.
    """
    said = events.Interruption(events=_ids(claim), reason=reason, error=error, operations=_noted(operations))
    alerts = [] if reason == STOPPED else [_alert("turn.interrupted", claim, f"{reason}: {error}")]
    how = DelegationStatus.CANCELLED if reason == STOPPED else DelegationStatus.FAILED
    return TurnCommit(
        claim=claim,
        consumed=claim.events,
        entries=[_entry(claim, events.INTERRUPTED, claim.turn_id, said)],
        alerts=alerts,
        finished=_tasks(claim.events, f"{reason}: {error}", how),
        end=RunEnd.STOPPED,
        error=f"{reason}: {error}",
    )


def parked(claim: TurnClaim, *, reason: str, error: str) -> NewAlert:
    """The alert of a turn that waits for a person."""
    return _alert("turn.parked", claim, f"{reason}: {error}; see `postroad stream resolve`")


def _ids(claim: TurnClaim) -> list[str]:
    return [event.event_id for event in claim.events]


def _alert(code: str, claim: TurnClaim, said: str) -> NewAlert:
    return NewAlert(code=code, subject=claim.stream, detail=said[:DETAIL_CHARS_MAX])


def _entry(claim: TurnClaim, kind: str, about: str, said: msgspec.Struct) -> NewEntry:
    return NewEntry(
        entry_id=f"{kind}:{about}",
        kind=kind,
        data=msgspec.json.encode(said).decode(),
        run_id=claim.run_id,
        cause=claim.turn_id,
    )


def _noted(operations: Sequence[Operation]) -> list[Operation]:
    """Those that acted first of all, each short enough for an entry."""
    most_telling = sorted(operations, key=lambda one: one.effect in ("read", "idempotent"))[:OPERATIONS_MAX]
    return [
        msgspec.structs.replace(one, arguments=_short(one.arguments), result=_short(one.result))
        for one in operations
        if one in most_telling
    ]


def _short(value: Any) -> Any:
    encoded = msgspec.json.encode(value).decode()
    return value if len(encoded) <= DETAIL_CHARS_MAX else safe_error(encoded)
