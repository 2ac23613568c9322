"""What must hold of turns and of timers. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from postroad.model.crons import TYPE_PREFIX
from postroad.model.ids import timer_event_id
from postroad.model.lifecycle import Status
from postroad.testing.simulation.checks_delegations import is_deeper
from postroad.testing.simulation.errands import CREW, HELD, Held
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ticking import is_cron
from postroad.testing.simulation.workload import AUDIT, NOTED, REPLACED, Noted, Order, Step

OWN_TIMERS = (CREW, TYPE_PREFIX)  # whose timers no order has asked for
_WRITING_ENDS = frozenset({"committed", "failed", "stopped"})


def t1_single_effect(h: History) -> Iterator[str]:
    """Of all runs of a turn one commits, and its entries stand together."""
    committed = Counter((run.stream, run.turn_id) for run in h.runs if run.end_reason == "committed")
    yield from (f"turn {turn} of {stream} was committed {n} times" for (stream, turn), n in committed.items() if n > 1)
    for stream, rows in h.logs.items():
        for run, those in grouped(rows, "run_id").items():
            if those[-1].seq - those[0].seq != len(those) - 1:
                yield f"{stream}: the entries of run {run} are apart"


def t2_fence(h: History) -> Iterator[str]:
    """Only a run that ended as the owner of its stream has written entries; at the end every run has ended."""
    ends = {run.run_id: run.end_reason for run in h.runs}
    for row in h.log:
        if ends.get(row.run_id) not in _WRITING_ENDS:
            yield f"{row.stream}: entry {row.seq} is of run {row.run_id}, which is {ends.get(row.run_id)}"
    running = [run.run_id for run in h.runs if run.end_reason is None]
    if h.end and running:
        yield f"runs {running} have not ended"


def t3_atomic_finish(h: History) -> Iterator[str]:
    """A turn's events are consumed exactly if everything that it decided is there."""
    decided = list(_decided(h))
    for (stream, name), order in decided:
        for step in order.steps:
            yield from (f"{name} of {stream} is decided, {lack}" for lack in _missing(h, stream, step))
    yield from _undecided(h, [(stream, step) for (stream, _), order in decided for step in order.steps])
    notes = Counter((row.stream, msgspec.json.decode(row.data, type=Noted).event) for row in _noted(h))
    for place, _ in decided:
        if notes[place] != 1:
            yield f"{place} was noted {notes[place]} times"


def _decided(h: History) -> Iterator[tuple[tuple[str, str], Order]]:
    """The orders that a handler's decision has consumed."""
    ends = {run.run_id: run.end_reason for run in h.runs}
    landed = {(row.stream, row.entry_id): row for row in h.log}
    replaced = [row for row in h.log if row.kind == REPLACED.name]
    instead = {(row.stream, msgspec.json.decode(row.data, type=Noted).event) for row in replaced}
    for place, order in h.orders.items():
        row = landed.get(place)
        if row is None or place in instead or row.stream.startswith(AUDIT):
            continue
        if ends.get(row.run_id) == "committed":
            yield place, order


def _noted(h: History) -> Iterator[Any]:
    return (row for row in h.log if row.kind == NOTED.name)


def _missing(h: History, stream: str, step: Step) -> Iterator[str]:
    match step.do:
        case "send":
            rows = [row for row in h.dispatches if row.key == step.name]
            if not rows or (rows[0].stream, rows[0].kind) != (stream, step.kind):
                yield f"its dispatch {step.name} is missing"
        case "publish":
            if (step.name, step.kind) not in h.known:
                yield f"its event {step.kind} for {step.name} is missing"
        case "delegate":
            if (stream, step.name) not in _delegated(h) | _held(h):
                yield f"its delegation {step.name} is missing"
        case "timer" | "rearm":
            if (stream, step.name) not in {(row.stream, row.key) for row in h.timers}:
                yield f"its timer {step.name} is missing"
        case "ack":
            if not any(row.id in step.name and row.status == Status.ACKED for row in h.dispatches):
                yield f"its acknowledgement of {step.name} is missing"
        case "write":
            if step.name not in h.written:
                yield f"its row {step.name} is missing"


def _undecided(h: History, steps: list[tuple[str, Step]]) -> Iterator[str]:
    """What is there although no turn has decided it and no client asked for it."""
    sent = {step.name for _, step in steps if step.do == "send"}
    set_ = {(stream, step.name) for stream, step in steps if step.do in ("timer", "rearm")}
    set_ |= {(call.stream, call.key) for call in h.ledger.attempted("timer")}
    wrote = {step.name for _, step in steps if step.do == "write"}
    wrote |= {call.key for call in h.ledger.calls if call.joined}
    asked = {call.key for call in h.ledger.attempted("send")}
    for row in h.dispatches:
        if "replay_of" not in row.origin and row.key not in (sent if row.stream else asked):
            yield f"dispatch {row.key} of {row.stream!r} was never decided"
    yield from (f"timer {place} was never decided" for place in _places(h) - set_)
    yield from (f"row {name} was never decided" for name in h.written - wrote)
    passed_on = {(row.stream, row.key) for row in h.delegations if is_deeper(row)}
    delegated = {(stream, step.name) for stream, step in steps if step.do == "delegate"}
    yield from (f"{place} was never delegated" for place in _delegated(h) - delegated - passed_on)


def _places(h: History) -> set[tuple[str, str]]:
    return {(row.stream, row.key) for row in h.timers if not row.stream.startswith(OWN_TIMERS)}


def _delegated(h: History) -> set[tuple[str, str]]:
    return {(row.stream, row.key) for row in h.delegations}


def _held(h: History) -> set[tuple[str, str]]:
    """What turns would have delegated, had they been allowed to."""
    rows = [row for row in h.log if row.kind == HELD.name]
    return {(row.stream, msgspec.json.decode(row.data, type=Held).key) for row in rows}


def t6_bounded(h: History) -> Iterator[str]:
    """A handler is called for a turn at most as often as it says, and each call is a run of its own."""
    for stream, turn, attempt in h.tried:
        if not 1 <= attempt <= h.options.turn_attempts:
            yield f"turn {turn} of {stream} was tried at attempt {attempt}"
    runs = Counter((run.stream, run.turn_id) for run in h.runs)
    for place, times in Counter((stream, turn) for stream, turn, _ in h.tried).items():
        if times > runs[place]:
            yield f"turn {place} was tried {times} times in {runs[place]} runs"


def m1_not_lost(h: History) -> Iterator[str]:
    """A timer has fired exactly if its event is there; at the end none is armed but those of crons."""
    known = h.known
    for row in h.timers:
        event = (row.stream, timer_event_id(row.key, row.generation)) in known
        if event != (row.status == "fired"):
            yield f"timer {row.key} of {row.stream} is {row.status}, its event {'is' if event else 'is not'} there"
        if h.end and row.status == "armed" and not is_cron(row.stream):
            yield f"timer {row.key} of {row.stream} is still armed"


def m2_not_early(h: History) -> Iterator[str]:
    """A timer's event came at its time or later."""
    rang = {place: rows[0].at for place, rows in grouped(h.rang, "stream", "event_id").items()}
    for row in h.timers:
        at = rang.get((row.stream, timer_event_id(row.key, row.generation)))
        if at is not None and at < row.fire_at:
            yield f"timer {row.key} of {row.stream} fired {row.fire_at - at} µs early"


def m7_known_timer(h: History) -> Iterator[str]:
    """A timer's event belongs to a timer of its stream."""
    ids = {(row.stream, timer_event_id(row.key, g)) for row in h.timers for g in range(row.generation + 1)}
    for stream, name in h.known:
        if name.startswith("evt:") and (stream, name) not in ids:
            yield f"{name} of {stream} belongs to no timer"
