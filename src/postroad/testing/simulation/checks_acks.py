"""What must hold of acknowledgements and of withdrawals. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from postroad.model.lifecycle import Reason, Status
from postroad.testing.simulation.checks_outbox import attempt_of, changes, starts
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.history import History, about, grouped
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.sink import Begun
from postroad.testing.simulation.workload import retry_of

OPERATOR = "operator"
_OVER = frozenset({Status.DEAD_LETTER, Status.EXPIRED})


def a1_by_a_token(h: History) -> Iterator[str]:
    """What is acked asked for it, and a token of its epoch was presented and not refused."""
    presented = {(deed.subject, deed.epoch) for deed in _acks(h) if deed.answer is not Answer.REFUSED}
    for row in h.dispatches:
        if row.status == Status.ACKED and not row.ack_required:
            yield f"{row.key} is acked and never asked for it"
        elif row.status == Status.ACKED and (row.id, row.epoch) not in presented:
            yield f"{row.key} is acked in epoch {row.epoch}, for which no token was presented"


def a2_no_send_after(h: History) -> Iterator[str]:
    """Every send that began was claimed before; what is acked is claimed no more, whenever it began to be sent."""
    claimed = {(step.entity, *attempt_of(step)) for step in h.transitions if starts(step)}
    for life, id, what in h.sends:
        if isinstance(what, Begun) and (id, h.epoch(id, what.first), what.attempt) not in claimed:
            yield f"{life} sends {id}, attempt {what.attempt}, of which history knows nothing"
    for id, story in h.stories.items():
        acked = next((step.id for step in story if step.reason_code == Reason.ACKED), None)
        after = [step.reason_code for step in changes(story) if acked is not None and step.id > acked]
        if after:
            yield f"{id} was acked, and then {after}"


def a3_no_other_token(h: History) -> Iterator[str]:
    """A token is refused only for what is so: another epoch, an end before it, a dispatch that is gone."""
    rows = {row.id: row for row in h.dispatches}
    gone = {row.id for row in h.purged}
    for deed in _acks(h):
        if deed.answer is Answer.REFUSED and not _rightly(deed, rows.get(deed.subject), gone, h):
            yield f"a token of epoch {deed.epoch} of {deed.subject} was refused: {deed.error}"


def _rightly(deed: Deed, row: Any, gone: set[str], h: History) -> bool:
    match deed.error:
        case "BadAckToken":
            return row is None or deed.epoch < row.epoch
        case "AckRefused":
            return any(step.to_status in _OVER for step in h.stories.get(deed.subject, []))
        case "DispatchNotFound":
            return deed.subject in gone
    return False


def a4_once(h: History) -> Iterator[str]:
    """However often a dispatch is acknowledged, its history says it once."""
    for id, times in Counter(step.entity for step in h.transitions if step.reason_code == Reason.ACKED).items():
        if times > 1:
            yield f"{id} was acked {times} times"


def a5_wins(h: History) -> Iterator[str]:
    """Whoever was told that a dispatch is acknowledged, in that epoch, finds it so for ever."""
    rows = {row.id: row for row in h.dispatches}
    for deed in _acks(h):
        row = rows.get(deed.subject)
        stands = row is not None and row.status == Status.ACKED and row.epoch == deed.epoch
        if deed.answer is Answer.OK and not stands:
            found = "gone" if row is None else f"{row.status} in epoch {row.epoch}"
            yield f"{deed.subject} was acknowledged in epoch {deed.epoch}, and is {found}"


def a7_not_by_a_send(h: History) -> Iterator[str]:
    """What asks for an acknowledgement is never delivered: once sent it waits for the whole delay of its kind."""
    rows = {row.id: row for row in h.dispatches}
    for id, story in h.stories.items():
        row = rows.get(id)
        if row is None or not row.ack_required:
            continue
        if any(step.to_status == Status.DELIVERED for step in story):
            yield f"{row.key} is delivered, not acknowledged"
        for before, step in pairwise(changes(story)):
            if before.reason_code != Reason.TRANSPORT_OK or step.reason_code != Reason.ATTEMPT:
                continue
            least = retry_of(row.kind, h.options).bound(about(before)["attempt"])
            if step.at - before.at < least:
                yield f"{row.key}: it waited {step.at - before.at} µs for an acknowledgement"


def o19_withdrawn(h: History) -> Iterator[str]:
    """A withdrawal that was accepted has ended its dispatch while it was pending; each one is a row of history."""
    rows = {row.key: row for row in h.dispatches}
    accepted = [deed for deed in h.deeds if deed.who == "app" and deed.answer is Answer.OK and deed.done]
    for key, deeds in grouped(accepted, "subject").items():
        story = h.stories.get(rows[key].id, []) if key in rows else []
        steps = [step for step in story if step.reason_code == Reason.WITHDRAWN and step.source != OPERATOR]
        if len(steps) < len(deeds) or any(step.from_status != Status.PENDING for step in steps):
            yield f"{key} was withdrawn {len(deeds)} times; its history has {[step.from_status for step in steps]}"


def _acks(h: History) -> list[Deed]:
    return [deed for deed in h.deeds if deed.verb == "ack"]
