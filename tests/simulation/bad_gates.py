"""Histories in which something is wrong with gates or rates, each a good one with one thing changed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from postroad.testing.simulation.gate_walk import Opened
from postroad.testing.simulation.history import History
from tests.simulation.picking import change, first, sent, start_of


def held(h: History) -> Any:
    """The step by which a dispatch was held."""
    return first(h.transitions, reason_code="dispatch.pending.held")


def open_what_is_down(h: History) -> None:
    """A gate that was kept closed by its probe is opened instead, by nobody."""
    place = next(place for place, log in enumerate(h.gate_log) if log.did == "keep")
    h.gate_log[place].did = "open"
    del h.gate_log[place + 1 :]
    h.audit.clear()


def insert_close(h: History, **changes: Any) -> Any:
    """Close a gate in which nothing goes wrong, right at the beginning of everything."""
    log = SimpleNamespace(**vars(first(h.gate_log, did="close")))
    log.until = log.at + 1_000_000
    vars(log).update(failures=1, **changes)
    h.gate_log.insert(0, log)
    return log


def send_through(h: History) -> None:
    """A gate that was closed before anything was sent."""
    insert_close(h, kind=sent(h).kind, host="", place=0)


def forget_nobody(h: History) -> None:
    """A gate of a host to which nothing ever goes, and of a kind that is sent."""
    start = start_of(h)
    insert_close(h, kind=sent(h).kind, host="nowhere.example", place=start.id - 1, at=0)


def without_jumps(h: History) -> None:
    """What has a bound only where the clock is true."""
    h.options = msgspec.structs.replace(h.options, jumps=0)


def take_forever(h: History) -> None:
    """What went to nothing that was down ended long after everything was well."""
    without_jumps(h)
    row = next(row for row in h.outbox if row.status == "delivered" and row.lane is None and row.host is None)
    h.gate_log.clear()
    h.gates.clear()
    h.stories[row.id][-1].at += 10**12


def open_late(h: History) -> None:
    """A gate was opened long after everything was well."""
    without_jumps(h)
    began = h.transitions[0].at
    h.walk.opened.append(Opened(("sim.page", ""), h.now + 10**12, began, began))


def send_at_once(h: History) -> None:
    """Two sends at one moment of what has a rate."""
    ids = {row.id for row in h.outbox if row.kind == "sim.sms"}
    starts = [step for step in h.transitions if step.entity in ids and step.reason_code.endswith(".attempt")]
    starts[1].at = starts[0].at


BAD_GATES: dict[str, Callable[[History], None]] = {
    "H1": send_through,
    "H2": change(lambda h: first(h.gate_log, did="take"), at=0),
    "H3": change(lambda h: first(h.gate_log, did="close"), at=0),
    "H4": change(held, at=2**60),
    "H5": open_what_is_down,
    "H6": forget_nobody,
    "H7": take_forever,
    "H8": open_late,
    "H9": send_at_once,
    "H10": lambda h: h.turned_away.clear(),
}
