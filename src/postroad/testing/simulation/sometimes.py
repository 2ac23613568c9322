"""What must have happened somewhere in a few hundred seeds: a state that none of them reaches is not tested."""

from collections import Counter
from collections.abc import Mapping

from postroad.model.failpoints import FAILPOINTS
from postroad.model.lifecycle import Reason, RunEnd, Status, TimerStatus
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ledger import Answer
from postroad.testing.simulation.workload import REPLACED

# Reached by operators, by acknowledgements and at gates, which the simulated programs have none of.
_ELSEWHERE = frozenset(
    {
        Reason.HELD,
        Reason.OPERATOR_RETRY,
        Reason.ACKED,
        Reason.ACK_TIMEOUT,
        Reason.RESOLVED_SENT,
        Reason.RESOLVED_DISCARDED,
    }
)
# Nor is anything purged there.
_REACHED_ELSEWHERE = frozenset(
    {"migration.statement", "acks.verified", "purging.deleted", "purging.buried", "retention.ended"}
)

# A state and the count that says how often it was reached.
SOMETIMES: Mapping[str, str] = {
    **{f"a process dies at {name}": f"at {name}" for name in FAILPOINTS if name not in _REACHED_ELSEWHERE},
    **{f"a dispatch: {reason}": reason for reason in Reason if reason not in _ELSEWHERE},
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
    counts["arrived again"] = sum(times > 1 for times in arrived.values())
    return counts
