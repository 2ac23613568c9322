"""What must have happened somewhere in a few hundred seeds: a state that none of them reaches is not tested."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from postroad.engine.endings import STOPPED
from postroad.model.failpoints import FAILPOINTS
from postroad.model.lifecycle import Reason, RunEnd, Status, TimerStatus
from postroad.model.operations import EFFECTS, CallStatus
from postroad.store.queues import STREAM_DELETED
from postroad.store.resolving import HOW
from postroad.store.stopping import WITHDRAWN
from postroad.store.transitions import STALE
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.history import History, about, grouped
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.minding import RESOLVE
from postroad.testing.simulation.operating import ACTOR
from postroad.testing.simulation.outages import asked_to_wait, named
from postroad.testing.simulation.sometimes_crons import CRONS, DELEGATIONS, delegated, ticked
from postroad.testing.simulation.sometimes_reports import REPORTS, reported
from postroad.testing.simulation.workload import REPLACED

# The schema is made before a run begins, and all that has happened is kept.
_REACHED_ELSEWHERE = frozenset({"migration.statement", "retention.ended", "delegations.ended"})
# What operators do is done, refused, or left without an answer.
_OPERATED = {
    "an operator retries": "operator retry done",
    "an operator retries with force": "operator retry forced done",
    "an operator retries many": "operator retry many done",
    "an operator resends what may have arrived": "operator resolve resend done",
    "an operator replays": "operator replay done",
    "an operator withdraws": "operator withdraw done",
    "an operator purges": "operator purge done",
    "an operator purges what is in flight": "operator purge forced done",
    "an operator purges many": "operator purge many done",
    "an operator is refused a retry": "operator retry refused",
    "an operator is refused a resolve": "operator resolve refused",
    "an operator is refused a purge": "operator purge refused",
    "an operator gets no answer": "operator unanswered",
    "an operator opens a gate": "operator gate.open done",
}
_GATES = {
    "a host's gate is closed": "gate close host",
    "a kind's gate is closed": "gate close kind",
    "a probe finds it down again": "gate kept",
    "a probe's process dies or is late": "gate probe lost",
    "a probe's answer opens its gate": "gate opened by its probe",
    "a person opens a gate": "gate opened by hand",
    "a host's gate is forgotten": "gate forgotten",
    "what could not be reached for long is tried again": "unreachable backoff",
    "what could not be reached for long dies": "unreachable dead",
    "what was held is sent": "held delivered",
    "what is down asks to wait": "asked to wait",
}
_TOOLS = {
    "a process dies before a tool does its work": "crash before a tool's work",
    "a process dies after a tool did its work": "crash after a tool's work",
    **{f"a call of a tool that is {effect} is of a run that was lost": f"lost {effect}" for effect in EFFECTS},
    **{f"a recorded result is used again: {effect}": f"reused {effect}" for effect in EFFECTS},
    "a keyed call is made again": "again keyed",
    "a tool fails": "call failed",
    "a tool does its work after its run is over": "happened late",
    "a turn decides otherwise than one that acted": "stopped turn.interrupted.mismatch",
    "a turn leaves out what was done": "stopped turn.interrupted.left_out",
    "a turn that must not be run again stops": "stopped turn.interrupted.effects",
    "a turn that acted is out of attempts": "stopped turn.dead.max_attempts",
    "a stop ends a turn under way": "stopped running",
    "a stop ends a turn that backs off": "stopped backing off",
    "a stop ends a parked turn": "stopped parked",
    "a stop withdraws what waits": f"dead {WITHDRAWN}",
    **{f"an operator resolves a parked stream: {how}": f"operator {RESOLVE}{how} done" for how in HOW},
    "a stream is deleted during a turn": "deleted running",
    "a stream is deleted while events wait": f"dead {STREAM_DELETED}",
    "what is published to a deleted stream is refused": "refused StreamDeleted",
    "an outcome comes to a deleted stream": "outcome dropped",
}

# A state and the count that says how often it was reached.
SOMETIMES: Mapping[str, str] = {
    **{f"a process dies at {name}": f"at {name}" for name in FAILPOINTS if name not in _REACHED_ELSEWHERE},
    **{f"a dispatch: {reason}": reason for reason in Reason},
    **{f"a run ends: {end}": f"run {end}" for end in RunEnd},
    **{f"a call is answered: {answer}": f"call {answer}" for answer in Answer},
    "a timer is fired": f"timer {TimerStatus.FIRED}",
    "a timer is cancelled": f"timer {TimerStatus.CANCELLED}",
    "a timer fires in its second generation": "timer rearmed",
    "an event dies at its last attempt": "dead turn.dead.max_attempts",
    "an event dies because its claimants do": "dead turn.dead.interrupted",
    "an event dies at once": "dead turn.dead.permanent",
    "an event is offered again and accepted": "offered again",
    "other content under an event's or dispatch's key is refused": "refused KeyConflict",
    "a timer that fired is not set again": "refused TimerConflict",
    "a decision's key exists and the decision is replaced": "replaced",
    "the answer of COMMIT is lost, it has not happened": "lost commit.before",
    "the answer of COMMIT is lost, it has happened": "lost commit.after",
    "a group has several members": "group of several",
    "the answer of a group's COMMIT is lost": "group lost",
    "a process dies in a group": "group crash",
    "a group is refused and written member by member": "passed group.member",
    "an alert rings": "alert rung",
    "an alert rings twice": "alert rung twice",
    "a dispatch waits in a lane and is sent": "lane",
    "an acknowledgement comes while its dispatch is being sent": "acked delivering",
    "an acknowledgement comes between two sends": "acked pending",
    "a send ends after its dispatch was acknowledged": "acked late",
    "a dispatch is acknowledged twice": "acked twice",
    "an acknowledgement is that of a turn": "acked by a turn",
    "an acknowledgement gets no answer": "ack unanswered",
    "an acknowledgement comes after the end": "ack refused AckRefused",
    "an acknowledgement is of an earlier epoch": "ack refused BadAckToken",
    "an acknowledgement comes after the purge": "ack refused DispatchNotFound",
    "an acknowledgement of a later epoch ends it": "acked later epoch",
    "a program withdraws": "withdrawn",
    "a program withdraws too late": "withdrawn too late",
    **_OPERATED,
    **_GATES,
    **_TOOLS,
    **REPORTS,
    **DELEGATIONS,
    **CRONS,
    "a key is offered again after its purge": "offered after purge",
    "a claim of a running turn is lost": "lease.lost",
    "a dispatch expires before its first attempt": "expired unattempted",
    "a dispatch arrives more than once": "arrived again",
    "the clock jumps forward": "jump forward",
    "the clock jumps back": "jump back",
    "a process is stopped for longer than a lease": "long pause",
    "a process ends in order": "shutdown",
    "a process is killed while it waits": "kill",
}


def unreached(counts: Counter[str]) -> list[str]:
    """The states that no seed of those counted has reached."""
    return [state for state, name in SOMETIMES.items() if not counts[name]]


def _acked(h: History) -> Counter[str]:
    """How dispatches were acknowledged."""
    steps = [step for step in h.transitions if step.reason_code == Reason.ACKED]
    counts = Counter(f"acked {step.from_status}" for step in steps)
    counts["acked late"] = sum(h.stories[step.entity][-1].reason_code in STALE for step in steps)
    counts["acked by a turn"] = sum(step.actor == "turn" for step in steps)
    counts["acked later epoch"] = sum(row.status == Status.ACKED and row.epoch > 0 for row in h.dispatches)
    acks = [deed for deed in h.deeds if deed.verb == "ack" and not deed.how]
    accepted = Counter(deed.subject for deed in acks if deed.answer is Answer.OK)
    counts["acked twice"] = sum(times > 1 for times in accepted.values())
    counts["ack unanswered"] = sum(deed.answer is Answer.INFO for deed in acks)
    counts.update(f"ack refused {deed.error}" for deed in acks if deed.answer is Answer.REFUSED)
    return counts


def _done(h: History) -> Counter[str]:
    """What programs and operators have done, and how they were answered."""
    counts: Counter[str] = Counter()
    for deed in h.deeds:
        if deed.who == "app" and deed.answer is Answer.OK:
            counts["withdrawn" if deed.done else "withdrawn too late"] += 1
        elif deed.who == ACTOR:
            counts.update(_operated(deed))
    purged = {row.key for row in h.tombstones}
    counts["offered after purge"] = sum(call.key in purged for call in h.ledger.accepted("send"))
    return counts


def _operated(deed: Deed) -> list[str]:
    if deed.answer is Answer.INFO:
        return ["operator unanswered"]
    words = [deed.verb, deed.how] if deed.how == "resend" else [deed.verb]
    done = "done" if deed.done else "refused" if deed.refused else "in vain"
    found = [f"operator {' '.join(words)} {done}"]
    if deed.force:
        found.append(f"operator {deed.verb} forced {done}")
    if deed.answer is Answer.OK and not deed.subject:
        found.append(f"operator {deed.verb} many {done}")
    return found


def _gates(h: History) -> Counter[str]:
    """What gates did, and what became of what could not be reached."""
    counts = Counter(h.walk.counts)
    counts.update(f"gate close {'host' if log.host else 'kind'}" for log in h.gate_log if log.did == "close")
    down = [step for step in h.transitions if named(step.summary) is not None]
    counts["unreachable backoff"] = sum(step.reason_code == Reason.RETRY_BACKOFF for step in down)
    counts["unreachable dead"] = sum(step.to_status == Status.DEAD_LETTER for step in down)
    counts["asked to wait"] = sum(asked_to_wait(step.summary) for step in down)
    held = {step.entity for step in down if step.reason_code == Reason.HELD}
    counts["held delivered"] = sum(row.id in held and row.status == Status.DELIVERED for row in h.outbox)
    return counts


def _called(h: History) -> Counter[str]:
    """What became of tool calls."""
    ends = {run.run_id: run for run in h.runs}
    counts = Counter(f"{row.status} {row.effect}" for row in h.operations)
    counts["call failed"] = sum(row.status == CallStatus.FAILED for row in h.operations)
    lost = [row for row in h.operations if ends[row.run_id].end_reason == RunEnd.INTERRUPTED]
    counts.update(f"lost {row.effect}" for row in lost if row.status == CallStatus.STARTED)
    counts["again keyed"] = sum(
        row.effect == "keyed" and row.repeats is not None and row.status != CallStatus.REUSED for row in h.operations
    )
    ended = {run_id: run.ended_at for run_id, run in ends.items() if run.ended_at is not None}
    counts["happened late"] = sum(each.at > ended.get(each.who.run, each.at) for each in h.happened)
    return counts


def _stopped(h: History) -> Counter[str]:
    """How turns were stopped, and when."""
    counts: Counter[str] = Counter()
    handled = {one.run for one in h.handled}
    discarded = {row.turn_id for row in h.operations if row.resolved == "discard"}
    latest: dict[str, Any] = {}
    runs = {run.run_id: run for run in h.runs}
    for run in map(runs.__getitem__, h.began):
        before, latest[run.stream] = latest.get(run.stream), run
        if run.end_reason != RunEnd.STOPPED or run.error is None:
            continue
        counts["deleted running"] += run.error == "its stream was deleted"
        reason = run.error.partition(":")[0]
        if reason != STOPPED:
            counts[f"stopped {reason}"] += 1
        elif run.run_id in handled:
            counts["stopped running"] += 1
        elif before is not None and before.turn_id == run.turn_id:
            counts["stopped backing off"] += before.end_reason == RunEnd.FAILED
            counts["stopped parked"] += before.end_reason == RunEnd.STOPPED and run.turn_id not in discarded
    ended = [step for row in h.dispatches if row.stream in h.gone for step in h.stories[row.id]]
    counts["outcome dropped"] = sum("outcome" in about(step) for step in ended)
    return counts


def reached(h: History) -> Counter[str]:
    """What a finished run has shown, by the names of the counts."""
    counts = Counter(f"run {run.end_reason}" for run in h.runs)
    counts.update(step.reason_code for step in h.transitions)
    counts.update(f"timer {timer.status}" for timer in h.timers)
    counts.update(f"dead {row.reason}" for row in h.inbox)
    counts.update(f"call {call.answer}" for call in h.ledger.calls)
    counts.update(f"refused {call.error}" for call in h.ledger.calls if call.answer is Answer.REFUSED)
    published = grouped(h.ledger.accepted("publish"), "stream", "key")
    arrived = Counter(arrival.id for arrival in h.arrivals)
    rung = Counter((alert.code, alert.subject) for alert in h.rung)
    raised = Counter((alert.code, alert.subject) for alert in h.alerts)
    counts["timer rearmed"] = sum(t.status == TimerStatus.FIRED and t.generation > 0 for t in h.timers)
    counts["offered again"] = sum(len(calls) > 1 for calls in published.values())
    counts["replaced"] = sum(row.kind == REPLACED.name for row in h.log)
    counts["alert rung"] = len(h.rung)
    counts["alert rung twice"] = sum(times > raised[about] for about, times in rung.items())
    counts["expired unattempted"] = sum(row.status == Status.EXPIRED and not row.attempt for row in h.outbox)
    counts["lane"] = sum(row.lane is not None and row.status == Status.DELIVERED for row in h.outbox)
    counts.update(_acked(h))
    counts.update(_done(h))
    counts.update(_gates(h))
    counts.update(_called(h))
    counts.update(_stopped(h))
    for more in (reported, delegated, ticked):
        counts.update(more(h))
    counts["arrived again"] = sum(times > 1 for times in arrived.values())
    return counts
