"""What must hold of what operators do, and of what they leave. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from postroad.model.ids import outcome_id
from postroad.model.lifecycle import TERMINAL, Reason, Status
from postroad.store.transitions import RESOLVED, STALE
from postroad.testing.simulation.checks_outbox import attempt_of, changes, starts, was_cut_short
from postroad.testing.simulation.history import History, Rows, about, grouped
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.workload import KINDS, retry_of

SOURCE = "operator"
PURGED_IN_FLIGHT = "purged in flight"
_ARRIVED = frozenset({Reason.STALE_OK, Reason.RESOLVED_SENT})
_OUT_OF_ATTEMPTS = frozenset({Reason.MAX_ATTEMPTS, Reason.LEASE_LOST, Reason.ACK_TIMEOUT})
_STEPS = {Reason.OPERATOR_RETRY: "retry", Reason.RESOLVED_SENT: "sent", Reason.RESOLVED_DISCARDED: "discard"}


class _Audited(msgspec.Struct, frozen=True):
    """What the audit says was done to a dispatch."""

    done: str
    id: str
    force: bool


def p1_audited(h: History) -> Iterator[str]:
    """Whatever an operator did to a dispatch is in the audit as often as in its history, and was asked for."""
    audited = Counter((each.done, each.id) for each in _audited(h))
    happened = Counter((done, step.entity) for step in h.transitions if (done := _done(step)))
    happened.update(("purge", row.id) for row in h.purged if row.id in h.stories)
    for what in audited.keys() | happened.keys():
        if audited[what] != happened[what]:
            yield f"{what} is in the audit {audited[what]} times, and happened {happened[what]} times"
    told = Counter(
        (deed.verb, deed.subject) for deed in h.deeds if deed.subject and deed.answer is Answer.OK and deed.done
    )
    asked = Counter((deed.verb, deed.subject) for deed in h.deeds if deed.answer is not Answer.REFUSED)
    rows = Counter((row.action.removeprefix("dispatch."), row.subject) for row in h.audit if not _ids(row))
    for what, times in rows.items():
        if not told[what] <= times <= asked[what]:
            yield f"{what} was asked for {asked[what]} times, {told[what]} of them done; the audit has {times}"


def _done(step: Any) -> str:
    """What an operator did by this step, as the audit has it; '' if none did."""
    if step.source != SOURCE:
        return ""
    if step.reason_code == Reason.WITHDRAWN:
        return "" if step.summary.startswith(PURGED_IN_FLIGHT) else "withdraw"
    return "replay" if step.reason_code == Reason.ENQUEUED else _STEPS[step.reason_code]


def _audited(h: History) -> Iterator[_Audited]:
    """The audit's rows, one for each dispatch; of a replay the new one."""
    for row in h.audit:
        if not row.action.startswith("dispatch."):
            continue
        after = msgspec.json.decode(row.after)
        verb = row.action.removeprefix("dispatch.")
        done = after["how"].replace("resend", "retry") if verb == "resolve" else verb
        for id in _ids(row) or [after.get("made", row.subject)]:
            yield _Audited(done, id, after["force"])


def _ids(row: Any) -> list[str]:
    """The ids of the dispatches that a filter chose."""
    found: list[str] = msgspec.json.decode(row.after).get("ids", [])
    return found


def p2_purged(h: History) -> Iterator[str]:
    """What is gone was finished or purged with force, and its key stays taken."""
    there = {row.id for row in h.outbox}
    buried = {row.id for row in h.tombstones}
    for step in h.transitions:
        if step.reason_code == Reason.ENQUEUED and step.entity not in there | buried:
            yield f"{step.entity} is gone and has no tombstone"
    for key, times in Counter(row.key for row in h.dispatches).items():
        if times > 1:
            yield f"{key} was taken {times} times"
    forced = {each.id for each in _audited(h) if each.done == "purge" and each.force}
    for row in h.purged:
        story = h.stories.get(row.id, [])
        ended = any(step.summary.startswith(PURGED_IN_FLIGHT) for step in story)
        if story and (row.status not in TERMINAL or (ended and row.id not in forced)):
            yield f"{row.key} was purged while it was {row.status}"


def p3_retried(h: History) -> Iterator[str]:
    """Each retry begins an epoch, which has the attempts of its kind and no more; unforced, if it had not arrived."""
    forced = grouped([each for each in _audited(h) if each.done == "retry"], "id")
    allowed = {kind.name: retry_of(kind.name, h.options).attempts for kind in KINDS}
    for row in h.dispatches:
        epochs = _epochs(h.stories.get(row.id, []))
        if row.epoch != len(epochs) - 1:
            yield f"{row.key} is in epoch {row.epoch} after {len(epochs) - 1} retries"
        for number, steps in enumerate(epochs):
            strange = [step.reason_code for step in steps if _epoch(step) not in (None, number)]
            if strange:
                yield f"{row.key}: {strange} in epoch {number} are of another"
            yield from _wrong_attempts(row, steps, allowed[row.kind])
        audited = forced.get(row.id, [])
        for number in range(min(len(audited), len(epochs) - 1)):
            if not audited[number].force and _said_arrived(epochs[: number + 1]):
                yield f"{row.key} was retried without force although it had arrived"


def _epochs(story: Rows) -> list[Rows]:
    """A history by epochs, each from the step that begins it."""
    found: list[Rows] = []
    for step in story:
        if step.reason_code in (Reason.ENQUEUED, Reason.OPERATOR_RETRY):
            found.append([])
        found[-1].append(step)
    return found


def _epoch(step: Any) -> int | None:
    """The epoch that a step says it is of; what comes late may be of an earlier one."""
    if step.reason_code in STALE or step.reason_code == Reason.ENQUEUED:
        return None
    found: int | None = about(step).get("epoch")
    return found


def _wrong_attempts(row: Any, steps: Rows, allowed: int) -> Iterator[str]:
    """What is wrong with the number of an epoch's attempts: one that was cut short is one more than is allowed."""
    cut = sum(step.reason_code == Reason.RELEASED and was_cut_short(step) for step in steps)
    most = allowed + cut
    made = max((attempt_of(step)[1] for step in steps if starts(step)), default=0)
    out = any(step.reason_code in _OUT_OF_ATTEMPTS for step in steps)
    if made > most or (out and made != most):
        yield f"{row.key} had {made} attempts of {most}{' and was out of them' if out else ''}"


def _said_arrived(epochs: list[Rows]) -> bool:
    return any(step.reason_code in _ARRIVED for steps in epochs for step in steps)


def p4_resolved(h: History) -> Iterator[str]:
    """Only what may have arrived is resolved, once in its epoch; if it was sent, its stream is told so."""
    for row in h.dispatches:
        for number, steps in enumerate(_epochs(h.stories.get(row.id, []))):
            resolved = [step.reason_code for step in steps if step.reason_code in RESOLVED]
            died = [step.reason_code for step in changes(steps) if step.to_status == Status.DEAD_LETTER]
            if resolved and (len(resolved) > 1 or died != [Reason.UNKNOWN_OUTCOME]):
                yield f"{row.key} was resolved as {resolved} after {died}"
            told = (row.stream, outcome_id(row.key, number, Status.DELIVERED)) in h.known
            if row.stream and Reason.RESOLVED_SENT in resolved and not told:
                yield f"{row.key} was sent, and {row.stream} was not told"
