"""The tools of simulated programs, what they do to the world, and how the turns of orders call them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec

from postroad.engine.handlers import Handlers
from postroad.engine.turn import Turn
from postroad.model.operations import Effect

TIMEOUT_SECONDS = 2.0
STUCK_SECONDS = 5
LOOK, STORE, BOOK, PAY = "look", "store", "book", "pay"
EFFECT_OF: dict[str, Effect] = {LOOK: "read", STORE: "idempotent", BOOK: "keyed", PAY: "unsafe"}


class Who(NamedTuple):
    """The run for which a tool is called."""

    stream: str
    turn: str
    run: str


class Handled(NamedTuple):
    """That a run called its handler, with these events."""

    stream: str
    turn: str
    run: str
    events: tuple[str, ...]


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool really did, and for whom, whatever became of its answer. `at` in microseconds."""

    at: int
    who: Who
    tool: str
    name: str
    key: str


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that an order wants made, `times` times. `plan`: how it ends, each time that the tool is called.

    `calmly`: its failure does not fail the turn; what may be done again is tried once more. `otherwise`: what a turn
    decides that knows of an earlier run's calls: it leaves this one out, changes it, or looks at something else before.
    """

    name: str
    tool: str
    plan: list[str] = []
    take: float = 0
    times: int = 1
    calmly: bool = False
    otherwise: str = ""


class World(msgspec.Struct, frozen=True):
    """What tools reach: `asked` counts the calls of a tool by name; `happen` is what it does, and gives a number."""

    asked: Callable[[str, str], int]
    happen: Callable[[Who, str, str, str], int]


WHO: ContextVar[Who] = ContextVar("the run that calls tools")


def declare_tools(handlers: Handlers, world: World) -> None:
    """Declare one tool of each effect."""

    @handlers.tool(effect=EFFECT_OF[LOOK], timeout=TIMEOUT_SECONDS)
    async def look(name: str, plan: list[str], take: float) -> str:
        return await _work(world, LOOK, Call(name, LOOK, plan, take))

    @handlers.tool(effect=EFFECT_OF[STORE], timeout=TIMEOUT_SECONDS)
    async def store(name: str, plan: list[str], take: float) -> str:
        return await _work(world, STORE, Call(name, STORE, plan, take))

    @handlers.tool(effect=EFFECT_OF[BOOK], timeout=TIMEOUT_SECONDS)
    async def book(name: str, plan: list[str], take: float, *, key: str = "") -> str:
        return await _work(world, BOOK, Call(name, BOOK, plan, take), key)

    @handlers.tool(effect=EFFECT_OF[PAY], timeout=TIMEOUT_SECONDS)
    async def pay(name: str, plan: list[str], take: float) -> str:
        return await _work(world, PAY, Call(name, PAY, plan, take))


async def _work(world: World, tool: str, call: Call, key: str = "") -> str:
    """What it did, so that no two answers are the same."""
    who, plan = WHO.get(), call.plan
    nth = world.asked(tool, call.name)
    word = plan[min(nth, len(plan)) - 1] if plan else "ok"
    await asyncio.sleep(call.take)
    match word:
        case "refuse":
            raise ValueError("planned: refused")
        case "stuck":  # deaf to its cancellation, and it happens when everybody has given it up
            for _ in range(STUCK_SECONDS):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)
    number = world.happen(who, tool, call.name, key)
    match word:
        case "raise":
            raise ConnectionResetError("planned: the answer was lost")
        case "slow":
            await asyncio.sleep(60)
    return f"{tool} {call.name} {number}"


async def call_tools(turn: Turn, calls: Sequence[Call], *, together: bool) -> list[str]:
    """Make an order's calls, one after another or all at once; what they gave, in order."""
    WHO.set(who_of(turn))
    wanted = [call for call in calls for _ in range(call.times)]
    if not together:
        return [given for call in wanted for given in await _made(turn, call)]
    ended: list[Any] = await asyncio.gather(*(_made(turn, call) for call in wanted), return_exceptions=True)
    for end in ended:
        if isinstance(end, BaseException):
            raise end
    return [given for end in ended for given in end]


def who_of(turn: Turn) -> Who:
    """The run that this turn is."""
    return Who(turn.stream, turn.id, turn._claim.run_id)


async def _made(turn: Turn, call: Call) -> list[str]:
    """What a call gives; nothing if it fails and that does not matter."""
    name = call.name
    match call.otherwise if turn.interrupted else "":
        case "leave":
            return []
        case "change":
            name += "'"
        case "add":
            await turn.call(turn.tools[LOOK], f"{name}+", [], 0)
    tool = turn.tools[call.tool]
    try:
        return [await turn.call(tool, name, call.plan, call.take)]
    except Exception:
        if not call.calmly:
            raise
        return [] if call.tool == PAY else [await turn.call(tool, name, call.plan, call.take)]
