"""What turns delegate to crews, and how these carry it out: as the task itself says, which a checker can read."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from postroad.engine.declarations import TASK, TIMER_FIRED
from postroad.engine.turn import Turn
from postroad.model.delegations import Delegated, Task
from postroad.model.errors import Refused
from postroad.model.events import Event
from postroad.model.kinds import Kind
from postroad.testing.simulation.toolbox import Handled, who_of

CREW = "crew"
CREWS = 3
DEEPER = "+"
# How far any stream may delegate: so little that it is often too much.
DEPTH, FAN_OUT = 2, 3
HOWS = ("done", "done", "later", "error", "raise", "never", "slow")
FINISHES = frozenset({"done", "later", "slow"})


class Errand(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task: how it goes, how long that takes in seconds, and to how many others it is passed on, one by the other."""

    how: str
    take: float = 0
    deeper: int = 0


class Finished(msgspec.Struct, frozen=True):
    """What a crew notes that finishes a task: whose it was, and how that was to end."""

    parent: str
    key: str
    status: str


class Held(msgspec.Struct, frozen=True):
    """What a turn notes that may not delegate: under which key, and why."""

    key: str
    why: str


FINISHED = Kind("sim.finished", Finished)
HELD = Kind("sim.held", Held)


def delegate(turn: Turn, stream: str, errand: Errand, *, key: str, timeout: float) -> bool:
    """Delegate, or note that it may not be; whether it was."""
    try:
        turn.delegate(stream, errand, key=key, timeout=timeout)
    except Refused as error:
        if type(error) is not Refused:
            raise
        turn.record(HELD, Held(key, str(error)))
        return False
    return True


async def carry_out(
    turn: Turn, *, handled: Callable[[Handled], None], tried: Callable[[str, str, int], None]
) -> None:  # fmt: skip
    """A crew's turn: it begins tasks, and goes on with those that had to wait."""
    handled(Handled(*who_of(turn), tuple(event.key for event in turn.events)))
    tried(turn.stream, turn.id, turn.attempt)
    for event in turn.events:
        if (task := TASK.of(event)) is not None:
            await _begin(turn, event, task, msgspec.convert(task.data, Errand))
        elif (end := Delegated.of(event)) is not None:
            _go_on(turn, end.key.removesuffix(DEEPER))
        elif (rang := TIMER_FIRED.of(event)) is not None:
            _go_on(turn, rang["of"])


async def _begin(turn: Turn, event: Event, task: Task, errand: Errand) -> None:
    if errand.deeper:
        place = zlib.crc32(task.key.encode()) % CREWS
        others = [name for name in (f"{CREW}/{place}", f"{CREW}/{(place + 1) % CREWS}") if name != turn.stream]
        passed = Errand(errand.how, errand.take, errand.deeper - 1)
        if not delegate(turn, others[0], passed, key=task.key + DEEPER, timeout=task.timeout / 2):
            _finish(turn, task.parent, task.key, event, error="refused")
        return
    match errand.how:
        case "never":
            return
        case "later":
            turn.set_timer(f"{task.key}.t", after=errand.take, data={"of": task.key})
            return
        case "raise":
            raise RuntimeError("planned: raise")
        case "slow":
            await asyncio.sleep(errand.take)
    _finish(turn, task.parent, task.key, event, error="planned" if errand.how == "error" else None)


def _go_on(turn: Turn, key: str) -> None:
    for task in turn.tasks():
        if task.key == key:
            _finish(turn, task.parent, key, task)


def _finish(turn: Turn, parent: str, key: str, task: Any, error: str | None = None) -> None:
    turn.finish(None if error else {"of": key}, error=error, task=task)
    turn.record(FINISHED, Finished(parent, key, "failed" if error else "done"))
