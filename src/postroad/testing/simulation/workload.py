"""What the simulated programs do: handlers and senders that carry out what the event or message itself says.

So a checker can read off a stored payload what its turn must have caused, and every attempt of a turn decides
the same. Nothing here draws randomness.
"""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, text

from postroad.engine.declarations import OUTCOME
from postroad.engine.handlers import Handlers
from postroad.engine.turn import Turn
from postroad.model.dispatches import Alert, Dispatch
from postroad.model.errors import GiveUp, OutcomeUnknown, RetryLater
from postroad.model.events import Event
from postroad.model.folds import Fold
from postroad.model.kinds import Kind
from postroad.model.retry import Retry
from postroad.testing.simulation.errands import CREW, DEPTH, FAN_OUT, Errand, carry_out, delegate
from postroad.testing.simulation.ledger import ReportCall
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.owners import owner_of
from postroad.testing.simulation.ticking import Crons
from postroad.testing.simulation.toolbox import Call, Handled, World, call_tools, declare_tools, who_of

LOAD, ROOM, AUDIT = "load", "room", "audit"
# Conversations: turns of chats that must not be run again are shown, those of desks wait for an operator.
CHAT, DESK = "chat", "desk"
# Whose handlers are woken by reports; in all others they land between the turns.
WOKEN = (ROOM, DESK, CREW)
SECRET = "what signs acknowledgements in here"
FLOOR_SECONDS = 3.0
LINGER_SECONDS = 2.0  # between an arrival and the sender's return
MAIL_BUDGET_SECONDS = 30
# Every kind but SMS is retried after these times exactly, doubled each time up to the cap; SMS with jitter.
STEADY_FIRST, STEADY_CAP = 2, 16


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that an order wants done. `name` is a key, for `publish` the stream, for `ack` the token.

    To delegate: `kind` is the stream, `after` the time that it has, `plan` how it goes and how often it is passed on.
    """

    do: str
    name: str
    kind: str = ""
    after: float = 0
    plan: list[str] = []
    expires: float | None = None
    take: float = 0
    lane: str = ""
    ack: bool = False


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event: what its turn does, how long that takes, and how each attempt of it ends ("": well).

    `calls`: the tools that it calls first, `together` or one after another.
    """

    steps: list[Step] = []
    think: float = 0
    plan: list[str] = []
    calls: list[Call] = []
    together: bool = False


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message: how each attempt to send it ends; the last word holds for all that follow ([]: well).

    `ack`: it was sent with the wish for an acknowledgement.
    """

    plan: list[str] = []
    take: float = 0
    ack: bool = False


class Noted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a turn notes about an event: its id, how many entries the log had before this turn, what its tools gave."""

    event: str
    before: int
    said: str = ""
    got: list[str] = []


ORDER = Kind("sim.order", Order)
NOTED = Kind("sim.noted", Noted)
REPLACED = Kind("sim.replaced", Noted)
SMS, MAIL, PAGE, PAY, FAX = (Kind(f"sim.{name}", Message) for name in ("sms", "mail", "page", "pay", "fax"))
KINDS = (SMS, MAIL, PAGE, PAY, FAX)
BY_NAME = {kind.name: kind for kind in KINDS}
HOSTS = ("a.example", "b.example", "c.example:8443")
HOSTED = frozenset({MAIL.name, PAGE.name})
COUNT: Fold[int] = Fold("sim.count", int, lambda count, _: count + 1)
_WRITE = text("INSERT INTO sim_written (name) VALUES (:name)")


class Outside(msgspec.Struct, frozen=True):
    """What a simulated program reaches of the world. `reach` raises what a sender raises that cannot connect.

    `handled` hears of each call of a handler; what a turn reports, it reports within `telling`; without `tools` the
    program has none.
    """

    reach: Callable[[Dispatch[Message]], None]
    arrive: Callable[[Dispatch[Message]], None]
    tried: Callable[[str, str, int], None]
    ring: Callable[[Alert], None]
    alive: Callable[[], bool]
    handled: Callable[[Handled], None] = lambda handled: None
    telling: Callable[[ReportCall], AbstractContextManager[object]] = nullcontext
    tools: World | None = None


def declare(handlers: Handlers, options: Options, outside: Outside, *, faxes: bool) -> None:
    """Declare the simulated program; only one that `faxes` carries out the kind of that name."""
    special: dict[str, dict[str, Any]] = {
        PAGE.name: {"on_failure": "alert"},
        PAY.name: {"on_unknown": "park"},
    }
    if options.rates:
        special |= {SMS.name: {"rate": options.rates}, MAIL.name: {"rate_per_host": options.rates}}
    for kind in KINDS:
        if kind is FAX and not faxes:
            handlers.elsewhere(FAX)
            continue
        common: dict[str, Any] = {"timeout": options.send_timeout, "lease": options.lease}
        common["on_dead"] = "skip"  # here is nobody who would decide about a lane that a dead letter holds up
        about = common | {"retry": retry_of(kind.name, options)} | special.get(kind.name, {})
        handlers.sender(kind, concurrency=options.concurrency, **about)(partial(_send, outside=outside))
    work = partial(carry_out, handled=outside.handled, tried=outside.tried)
    _declare_turns(handlers, options, partial(_decide, outside=outside), work)
    crons = Crons(options, _told_by_crons(options), outside.handled, outside.tried, outside.telling)
    crons.declare(handlers)
    if options.owners:
        handlers.stream_owner(owner_of)
    if outside.tools is not None:
        declare_tools(handlers, outside.tools)
    handlers.alert_sink(outside.ring)


def retry_of(kind: str, options: Options) -> Retry:
    """How often and when a kind is tried again: SMS with jitter, MAIL within a budget, the others steadily."""
    if kind == SMS.name:
        return Retry(attempts=options.send_attempts, first=1, cap=8)
    more, budget = (2, MAIL_BUDGET_SECONDS) if kind == MAIL.name else (0, None)
    attempts = options.send_attempts + more
    return Retry(attempts=attempts, first=STEADY_FIRST, cap=STEADY_CAP, budget=budget, jitter=False)


def destination(kind: str, name: str) -> str:
    """Where a message goes: of some kinds three in four to a URL on one of the hosts, all others just to the name."""
    place = zlib.crc32(name.encode()) % (len(HOSTS) + 1)
    return f"https://{HOSTS[place]}/{name}" if kind in HOSTED and place < len(HOSTS) else name


def _declare_turns(
    handlers: Handlers, options: Options, decide: Callable[[Turn], Any], work: Callable[[Turn], Any]
) -> None:  # fmt: skip
    for stream_type in stream_types(options):
        if stream_type == AUDIT:
            handlers.recorded(AUDIT)
            continue
        if options.delegations:
            handlers.delegation(stream_type, depth=DEPTH, fan_out=FAN_OUT)
        handlers.turn(
            stream_type, debounce=1 if stream_type == ROOM else 0, debounce_max=3, concurrency=options.concurrency,
            attempts=options.turn_attempts, timeout=options.turn_timeout, lease=options.lease, on_duplicate=_replace,
            when_interrupted="park" if stream_type == DESK else "show", wake_on_report=stream_type in WOKEN,
        )(decide if stream_type != CREW else work)  # fmt: skip
        handlers.filter(stream_type, OUTCOME)(_delivered)


def stream_types(options: Options) -> tuple[str, ...]:
    """The types of streams that a seed has: loads always; rooms debounce, audits are recorded, crews get tasks."""
    conversations = [CHAT, DESK] if options.tools else []
    crews = [CREW] if options.delegations else []
    return (LOAD, *([ROOM] if options.rooms else []), *([AUDIT] if options.audits else []), *conversations, *crews)


def _told_by_crons(options: Options) -> list[str]:
    return [f"{kind}/{n}" for kind in stream_types(options) if kind != CREW for n in range(options.streams)]


def minded(options: Options) -> tuple[str, ...]:
    """The types of streams that people stop and delete."""
    return (*((CHAT, DESK) if options.tools else ()), *((CREW,) if options.delegations else ()))


def _delivered(event: Event) -> str | None:
    outcome = OUTCOME.of(event)
    return "delivered" if outcome is not None and outcome.status == "delivered" else None


async def _decide(turn: Turn, *, outside: Outside) -> None:
    outside.handled(Handled(*who_of(turn), tuple(event.key for event in turn.events)))
    outside.tried(turn.stream, turn.id, turn.attempt)
    before = turn.fold(COUNT)
    for event in turn.events:
        order = ORDER.of(event)
        got: list[str] = []
        if order is not None:
            await asyncio.sleep(order.think)
            if order.calls:
                got = await call_tools(turn, order.calls, together=order.together)
            _end_as_planned(order.plan, turn.attempt)
            for step in order.steps:
                VERBS[step.do](turn, step)
        turn.record(NOTED, Noted(event.key, before, event.kind if order is None else "", got))


def _end_as_planned(plan: list[str], attempt: int) -> None:
    match word_of(plan, attempt):
        case "" | "ok":
            return
        case "later":
            raise RetryLater("planned", after=FLOOR_SECONDS)
        case "giveup":
            raise GiveUp("planned")
        case "exit":
            raise SystemExit("planned")
        case word:
            raise RuntimeError(f"planned: {word}")


def word_of(plan: list[str], attempt: int) -> str:
    """What a plan says of an attempt, counted from 1."""
    return plan[min(attempt, len(plan)) - 1] if plan else ""


def _replace(turn: Turn, key: str) -> None:
    for event in turn.events:
        turn.record(REPLACED, Noted(event.key, 0, key))


def _send_step(turn: Turn, step: Step) -> None:
    message = Message(step.plan, step.take, step.ack)
    to = destination(step.kind, step.name)
    about: dict[str, Any] = {"to": to, "key": step.name, "lane": step.lane or None, "ack": step.ack}
    turn.send(BY_NAME[step.kind], message, after=step.after, expires=step.expires, **about)


def _write(conn: Connection, *, name: str) -> None:
    conn.execute(_WRITE, {"name": name})


def _publish_step(turn: Turn, step: Step) -> None:
    turn.publish(step.name, ORDER, Order(), key=step.kind)


def _delegate_step(turn: Turn, step: Step) -> None:
    errand = Errand(step.plan[0], step.take, len(step.plan) - 1)
    delegate(turn, step.kind, errand, key=step.name, timeout=step.after)


VERBS: dict[str, Callable[[Turn, Step], object]] = {
    "send": _send_step,
    "publish": _publish_step,
    "delegate": _delegate_step,
    "timer": lambda turn, step: turn.set_timer(step.name, after=step.after, data={"of": step.name}),
    "rearm": lambda turn, step: turn.rearm_timer(step.name, after=step.after, data={"of": step.name}),
    "cancel": lambda turn, step: turn.cancel_timer(step.name),
    "withdraw": lambda turn, step: turn.withdraw(step.name),
    "ack": lambda turn, step: turn.ack(step.name),
    "write": lambda turn, step: turn.write(partial(_write, name=step.name)),
}


async def _send(dispatch: Dispatch[Message], *, outside: Outside) -> str:
    word = word_of(dispatch.body.plan, dispatch.attempt)
    await asyncio.sleep(dispatch.body.take)
    outside.reach(dispatch)
    match word:
        case "ok" | "":
            outside.arrive(dispatch)
            return f"receipt of {dispatch.key}"
        case "lingers":
            outside.arrive(dispatch)
            await asyncio.sleep(LINGER_SECONDS)
            return f"receipt of {dispatch.key}"
        case "lost":
            outside.arrive(dispatch)
            raise ConnectionResetError("planned: the answer was lost")
        case "unknown":
            outside.arrive(dispatch)
            raise OutcomeUnknown("planned")
        case "later":
            raise RetryLater("planned", after=FLOOR_SECONDS)
        case "giveup":
            raise GiveUp("planned")
        case "slow":
            await asyncio.sleep(60)
        case "late":
            outside.arrive(dispatch)
            await asyncio.sleep(60)
        case "stuck":
            await _stuck(dispatch, outside)
    raise RuntimeError(f"planned: {word}")


async def _stuck(dispatch: Dispatch[Message], outside: Outside) -> None:
    """Ignores its cancellation, and arrives when everybody has given it up."""
    for _ in range(25):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
        if not outside.alive():
            raise asyncio.CancelledError
    outside.arrive(dispatch)
