"""What must hold of a run with real processes, beside the simulation's invariants. Each check yields what is wrong."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import pairwise
from typing import Any

import msgspec

from postroad.model.clock import SECOND
from postroad.model.lifecycle import Reason, Status
from postroad.store.transitions import STALE
from postroad.testing.chaos.evidence import Evidence
from postroad.testing.chaos.faults import Fault
from postroad.testing.chaos.sizes import CLOCK_ERROR, LEASE_SECONDS
from postroad.testing.simulation.checkers import CHECKS
from postroad.testing.simulation.history import History, Rows

# What tables alone can tell while everything moves on: nothing that compares them with the sink or the ledger.
STEADY = frozenset({"L1", "L2", "L8", "I2", "I6", "T1", "M1", "M7", "O3", "O4", "O8", "O11", "O12"})
# A place in the inbox is taken at the insert and seen at the commit: on Postgres two events that are published at the
# same time may land in either order. That of any others is L7.
# What was done to gates stands in the order of commits beside the history only where there is one writer at a time.
ONLY_ON_SQLITE = frozenset({"I3", "H1", "H3", "H5", "H6"})
BY_THE_SENDER = frozenset({Reason.TRANSPORT_OK, Reason.RETRY_BACKOFF, Reason.PERMANENT, Reason.MAX_ATTEMPTS})
UNEXPLAINED = ""
Check = Callable[[Evidence], Iterator[str]]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as a dispatch's history has it: what stood before it, its start, what followed until the next."""

    number: int
    before: Any
    start: Any
    after: Rows

    @property
    def lost_to(self) -> Any:
        """The step that took the claim away from its claimant because its lease was over; None: it settled itself."""
        step = next((step for step in self.after if step.reason_code not in STALE), None)
        if step is None or step.from_status != Status.DELIVERING:
            return None
        return step if "the lease of attempt" in step.summary or step.reason_code == Reason.DEADLINE else None


def steady(history: History) -> list[str]:
    """What is wrong at a moment in the middle of everything."""
    return _wrong(history, STEADY)


def verdict(evidence: Evidence) -> list[str]:
    """What is wrong at the end, each with the name of its invariant."""
    codes = {name.partition(" ")[0] for name in CHECKS}
    found = _wrong(evidence.history, codes if evidence.database == "sqlite" else codes - ONLY_ON_SQLITE)
    return found + [f"{name}: {wrong}" for name, check in OURS.items() for wrong in check(evidence)]


def _wrong(history: History, codes: Set[str]) -> list[str]:
    chosen = {name: check for name, check in CHECKS.items() if name.partition(" ")[0] in codes}
    return [f"{name}: {wrong}" for name, check in chosen.items() for wrong in check(history)]


def attempts(h: History) -> dict[str, list[Attempt]]:
    """Every attempt, by dispatch."""
    return {id: list(_attempts(story)) for id, story in h.stories.items()}


def _attempts(story: Rows) -> Iterator[Attempt]:
    starts = [place for place, step in enumerate(story) if step.reason_code == Reason.ATTEMPT]
    for place, following in pairwise([*starts, len(story)]):
        before = [step for step in story[:place] if step.reason_code not in STALE]
        # With the next start: if it took over a claim, that is how this attempt ended.
        after = story[place + 1 : following + 1]
        yield Attempt(number=_number(story[place]), before=before[-1], start=story[place], after=after)


def _number(step: Any) -> int:
    return int(msgspec.json.decode(step.metadata)["attempt"])


def causes(e: Evidence) -> dict[tuple[str, int], str]:
    """Why each attempt after a dispatch's first was made, by dispatch and number: UNEXPLAINED if nothing says so.

    `retried`: the one before failed; `given back`: its process was told to end; `overrun`: it ended after its lease
    and said so; else the fault that hit its claimant.
    """
    found: dict[tuple[str, int], str] = {}
    for id, made in attempts(e.history).items():
        for one, following in pairwise(made):
            match following.before.reason_code:
                case Reason.RETRY_BACKOFF:
                    found[id, following.number] = "retried"
                case Reason.HELD:
                    continue  # the same number again: why it was made stands there already
                case Reason.RELEASED:
                    found[id, following.number] = "given back"
                case _:
                    found[id, following.number] = _why_lost(e, one)
    return found


def _why_lost(e: Evidence, lost: Attempt) -> str:
    """The fault because of which a claim was lost.

    A claimant that was too slow says so as soon as it can; if it was ended before it could, that is the fault.
    """
    id, end = lost.start.entity, lost.after[-1].at if lost.lost_to is None else lost.lost_to.at
    late = [step for step in e.history.stories[id] if step.reason_code in STALE and _number(step) == lost.number]
    claimant = _claimant(e, lost)
    for fault in e.faults:
        of_its_life = fault.ended is None or fault.ended >= lost.start.at
        # A process that is stopped may hold SQLite's write lock, for which everybody waits.
        everybody = fault.kind == "stop" and e.database == "sqlite"
        at_the_time = fault.begun <= end and (everybody or _hits(fault, claimant))
        silenced = not late and claimant in fault.lives and fault.begun <= end + LEASE_SECONDS * SECOND
        if of_its_life and (at_the_time or silenced):
            return fault.kind
    return "overrun" if late else UNEXPLAINED


def _claimant(e: Evidence, lost: Attempt) -> str | None:
    """Who said that it sends this attempt. An earlier one of the same number was held and does not count: not its."""
    own = (lost.start.entity, lost.number)
    since = lost.start.at - CLOCK_ERROR
    return next((told.life for told in e.told if (told.id, told.attempt) == own and told.at >= since), None)


def _hits(fault: Fault, claimant: str | None) -> bool:
    """Whether a fault was this claimant's; None: it died, if it did, before it began to send."""
    return fault.kind in ("database", "group") or claimant is None or claimant in fault.lives


def duplicates(e: Evidence) -> Counter[str]:
    """What arrived although an earlier attempt had arrived too, by why that attempt was made."""
    why = causes(e)
    arrived: dict[str, set[int]] = {}
    for arrival in e.history.arrivals:
        arrived.setdefault(arrival.id, set()).add(arrival.attempt)
    return Counter(
        why.get((id, number), UNEXPLAINED) for id, numbers in arrived.items() for number in sorted(numbers)[1:]
    )


def g1_one_ledger(e: Evidence) -> Iterator[str]:
    """Accepted = landed + waiting + dead, and there are as many dispatches as beginnings in their history."""
    h = e.history
    places = Counter((row.stream, row.entry_id) for row in h.log) + Counter((r.stream, r.event_id) for r in h.inbox)
    for place in {(call.stream, call.key) for call in h.ledger.accepted("publish")}:
        if places[place] != 1:
            yield f"event {place} was accepted and is there {places[place]} times"
    begun = Counter(step.entity for step in h.transitions if step.from_status is None)
    rows = Counter(row.id for row in h.outbox)
    for id in begun | rows:
        if begun[id] != rows[id]:
            yield f"dispatch {id} has {rows[id]} rows and {begun[id]} beginnings"


def o4_a_lease_is_kept(e: Evidence) -> Iterator[str]:
    """A claim is taken away from its claimant when its lease is over, not earlier."""
    for id, made in attempts(e.history).items():
        for one in made:
            if one.lost_to is not None and one.lost_to.at < one.start.at + LEASE_SECONDS * SECOND - CLOCK_ERROR:
                yield f"attempt {one.number} of {id} lost its claim after {one.lost_to.at - one.start.at} µs"


def o5_stale_inert(e: Evidence) -> Iterator[str]:
    """What a process settled is the history's word on an attempt that this very process had begun."""
    story = attempts(e.history)
    begun: dict[tuple[str, str], set[int]] = {}
    for told in e.told:
        own = begun.setdefault((told.life, told.id), set())
        if told.attempt:
            own.add(told.attempt)
        elif told.reason in BY_THE_SENDER:
            words = {step.reason_code for one in story.get(told.id, []) if one.number in own for step in one.after}
            if told.reason not in words:
                yield f"{told.life} has settled {told.id} as {told.reason}, not one of its attempts {sorted(own)}"


def o9_every_loss_has_a_cause(e: Evidence) -> Iterator[str]:
    """Nobody's claim is taken away unless a fault hit its claimant, or it says itself that it ended too late."""
    for id, made in attempts(e.history).items():
        for one in made:
            if one.lost_to is not None and _why_lost(e, one) == UNEXPLAINED:
                yield f"attempt {one.number} of {id} lost its claim and nothing had happened to its claimant"


def w1_withdrawn(e: Evidence) -> Iterator[str]:
    """What was withdrawn, and confirmed so, has ended with that and is never sent afterwards."""
    rows = {row.key: row for row in e.history.outbox}
    for key in sorted(e.withdrawn):
        story = e.history.stories[rows[key].id] if key in rows else []
        steps = [step for step in story if step.reason_code not in STALE]
        if not steps or steps[-1].reason_code != Reason.WITHDRAWN:
            yield f"{key} was withdrawn, its history ends with {steps[-1].reason_code if steps else 'nothing'}"


def x1_no_surprise(e: Evidence) -> Iterator[str]:
    """No loop and no turn fails with anything but a database that is away or an answer that was lost."""
    yield from e.trouble


OURS: Mapping[str, Check] = {
    f"{check.__name__[:2].upper()} {check.__name__[3:].replace('_', ' ')}": check
    for check in (
        g1_one_ledger,
        o4_a_lease_is_kept,
        o5_stale_inert,
        o9_every_loss_has_a_cause,
        w1_withdrawn,
        x1_no_surprise,
    )
}
