"""Filters: which events of a claimed set need no decision, and why."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

from postroad.engine.calls import contained
from postroad.engine.declarations import TASK, Filter
from postroad.engine.endings import answer
from postroad.engine.telemetry import logger, traced
from postroad.engine.turn import event_of
from postroad.model.clock import SECOND
from postroad.model.delegations import OVERDUE
from postroad.model.events import OUTCOME_NAME, STOP_NAME, Event
from postroad.model.payload import safe_error
from postroad.model.rows import TurnClaim, TurnCommit


def noops(filters: Sequence[Filter], claim: TurnClaim, *, now: int) -> dict[str, str]:
    """Which events of the set need no decision, and why: reasons by event id. Runs user code."""
    found: dict[str, str] = {}
    for waiting in claim.events:
        event = event_of(claim.stream, waiting)
        # What a turn has begun it may go on with: only a task that nobody was at is answered.
        ours = stopped(event) or alerted(event) or (None if claim.again else overdue(event, waiting.received_at, now))
        reason = ours or next((r for f in filters if (r := _reason(f, event))), None)
        if reason:
            found[waiting.event_id] = reason
    return found


def prefix_answer(claim: TurnClaim, reasons: Mapping[str, str]) -> TurnCommit | None:
    """The commit of the longest prefix of the set that needs no decision; None if the first event needs one."""
    prefix = list(takewhile(lambda event: event.event_id in reasons, claim.events))
    return answer(claim, prefix, {e.event_id: reasons[e.event_id] for e in prefix}) if prefix else None


def _reason(filter_: Filter, event: Event) -> str | None:
    """What a filter says, fit to be stored; one that fails says that the event needs a decision."""
    try:
        reason = contained(filter_.reason, event)
        return safe_error(reason) if reason else None
    except Exception as error:
        logger.error("a filter failed on %s of %s: %s", event.key, event.stream, traced(error))
        return None


def stopped(event: Event) -> str | None:
    """Why an event that stops a stream, or cancels a task of it, needs no decision: what it stops has ended."""
    if event.kind != STOP_NAME:
        return None
    of = event.data
    return f"{of['key']!r} of {of['parent']} was cancelled" if "key" in of else "the stream was stopped"


def overdue(event: Event, received_at: int, now: int) -> str | None:
    """Why a task needs no decision any more: whoever wanted it is told that its time is over."""
    task = TASK.of(event)
    return OVERDUE if task is not None and received_at + task.timeout * SECOND <= now else None


def alerted(event: Event) -> str | None:
    """Why an outcome that operators were alerted of needs no decision: deciding could only loop."""
    if event.kind != OUTCOME_NAME or event.data.get("on_failure") != "alert":
        return None
    if event.data.get("status") not in ("dead_letter", "expired"):
        return None
    return "operators were alerted (needs_hero_task=false)"
