"""Histories in which something is wrong with tool calls, stops or deletions, each a good one with one thing changed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from postroad.testing.simulation.history import History
from tests.simulation.picking import change, first


def acted(h: History) -> Any:
    """A call that acted in a run that committed."""
    repeated = {(row.turn_id, row.repeats) for row in h.operations}
    rows = [row for row in h.operations if row.entry and (row.turn_id, row.ordinal) not in repeated]
    return next(row for row in rows if row.effect in ("keyed", "unsafe"))


def take_another_set(h: History) -> None:
    """A run that committed is said to have decided on another event as well."""
    place = next(n for n, one in enumerate(h.handled) if first(h.runs, run_id=one.run).end_reason == "committed")
    h.handled[place] = h.handled[place]._replace(events=("another", *h.handled[place].events))


def run_again(h: History) -> None:
    """The handler of a turn that has called what is unsafe is called once more."""
    unsafe = {row.run_id for row in h.operations if row.effect == "unsafe"}
    h.audit[:] = [row for row in h.audit if not row.action.startswith("stream.resolve")]
    h.handled.append(next(one for one in h.handled if one.run in unsafe))


def answer_differently(h: History) -> None:
    """A result that was used again is not the one that was recorded."""
    first(h.operations, status="reused").result = '"another"'


def forget_what_acted(h: History) -> None:
    """A call acted, is attached to nothing, and no entry tells of it."""
    row = acted(h)
    first(h.runs, run_id=row.run_id).end_reason = "stopped"
    row.entry = None


def withdraw_what_came_later(h: History) -> None:
    """What was withdrawn had come after the stop."""
    first(h.inbox, reason="turn.withdrawn").position = 2**60


def run_after_the_deletion(h: History) -> None:
    """A run of a deleted stream began after its deletion."""
    next(row for row in h.deleted if row.runs).runs -= 1


BAD_TOOLS: dict[str, Callable[[History], None]] = {
    "T4": take_another_set,
    "T5": run_again,
    "T7": change(acted, entry="of another"),
    "T8": run_after_the_deletion,
    "T9": change(lambda h: first(h.operations, effect="keyed"), key="another"),
    "T10": answer_differently,
    "T11": forget_what_acted,
    "T12": lambda h: h.late.append(SimpleNamespace(did="start", run_id="run", tool="pay")),
    "I8": withdraw_what_came_later,
}
