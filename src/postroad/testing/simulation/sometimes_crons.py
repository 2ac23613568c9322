"""What must have happened somewhere to delegations and to crons."""

from collections import Counter

import msgspec

from postroad.model.crons import read
from postroad.model.delegations import OVERDUE, DelegationStatus
from postroad.model.events import NOOP
from postroad.model.ids import delegated_id
from postroad.model.lifecycle import RunEnd
from postroad.store.delegations import DROPPED
from postroad.testing.simulation.errands import HELD
from postroad.testing.simulation.history import History
from postroad.testing.simulation.ticking import PERIOD, RAN, is_cron, policy_of

DELEGATIONS = {
    **{f"a delegation ends: {end}": f"delegation {end}" for end in DelegationStatus if end != DelegationStatus.OPEN},
    "a delegation ends with its task's turn": "delegation failed turn",
    "a delegation's end comes too late": "delegation late",
    "a delegation is over before it begins": "delegation overdue",
    "a delegation's end wakes who wanted it": "delegation wakes",
    "a turn may not delegate so much": "delegation held open",
    "a turn may not delegate so deep": "delegation held deep",
}
CRONS = {
    "a cron runs": "cron ran",
    "a cron's run fails for good": "cron dead",
    "a cron's run is lost with its process": "cron interrupted",
    "a cron's time is left out": "cron left out",
    "a cron makes up for what was missed": "cron caught up",
    "a cron's run reports": "cron told",
    "a cron's run reports once more": "cron told again",
}


class _Noop(msgspec.Struct, frozen=True):
    reason: str = ""


def delegated(h: History) -> Counter[str]:
    """How delegations ended, and what came after that."""
    counts = Counter(f"delegation {row.status}" for row in h.delegations)
    counts["delegation failed turn"] = sum((row.error or "").startswith("turn.") for row in h.delegations)
    counts["delegation late"] = sum("too late" in (row.note or "") for row in h.delegations)
    counts["delegation dropped"] = sum(row.note == DROPPED for row in h.delegations)
    told = {(row.stream, delegated_id(row.key)) for row in h.delegations}
    counts["delegation wakes"] = sum((one.stream, key) in told for one in h.handled for key in one.events)
    noops = [row for row in h.log if row.kind == NOOP and not is_cron(row.stream)]
    counts["delegation overdue"] = sum(msgspec.json.decode(r.data, type=_Noop).reason == OVERDUE for r in noops)
    held = [row.data for row in h.log if row.kind == HELD.name]
    counts["delegation held open"] = sum("delegations open" in data for data in held)
    counts["delegation held deep"] = sum("delegations deep" in data for data in held)
    return counts


def ticked(h: History) -> Counter[str]:
    """What became of the times of crons."""
    counts = Counter[str]()
    counts["cron ran"] = sum(row.kind == RAN.name for row in h.log)
    counts["cron dead"] = sum(is_cron(row.stream) and row.reason is not None for row in h.inbox)
    counts["cron interrupted"] = sum(is_cron(run.stream) and run.end_reason == RunEnd.INTERRUPTED for run in h.runs)
    told = Counter((call.stream, call.key) for call in h.ledger.reports if is_cron(call.key))
    counts["cron told"] = len(told)
    counts["cron told again"] = sum(times > 1 for times in told.values())
    for row in h.log:
        if is_cron(row.stream):
            counts["cron left out"] += row.kind == NOOP
            fire = read(row.data) if row.entry_id.startswith("evt:") else None
            if fire is not None:
                counts["cron skipped"] += fire.skipped > 0
                late = row.received_at - fire.at > PERIOD
                counts["cron caught up"] += late and policy_of(row.stream) == "all"
    return counts
