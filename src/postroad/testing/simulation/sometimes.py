"""What must have happened somewhere in a few hundred seeds: a state that none of them reaches is not tested."""

from collections import Counter
from collections.abc import Mapping

from postroad.model.failpoints import FAILPOINTS
from postroad.model.lifecycle import Reason, RunEnd, Status, TimerStatus
from postroad.store.transitions import STALE
from postroad.testing.simulation.deeds import Deed
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.operating import ACTOR
from postroad.testing.simulation.outages import asked_to_wait, named
from postroad.testing.simulation.workload import REPLACED

# The schema is made before a run begins, all that has happened is kept; and there are no tools, no streams that are
# deleted and no turns that are stopped.
_REACHED_ELSEWHERE = frozenset({
    "migration.statement", "retention.ended", "turns.deleted", "turns.attached",
    "tool.before_start", "tool.started", "tool.returned", "tool.recorded",
})  # fmt: skip
_ENDS_ELSEWHERE = frozenset({RunEnd.STOPPED})
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

# A state and the count that says how often it was reached.
SOMETIMES: Mapping[str, str] = {
    **{f"a process dies at {name}": f"at {name}" for name in FAILPOINTS if name not in _REACHED_ELSEWHERE},
    **{f"a dispatch: {reason}": reason for reason in Reason},
    **{f"a run ends: {end}": f"run {end}" for end in RunEnd if end not in _ENDS_ELSEWHERE},
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
    counts["arrived again"] = sum(times > 1 for times in arrived.values())
    return counts
