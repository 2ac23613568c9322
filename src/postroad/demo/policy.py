"""Deciders: what an event means for a load. Rules by default; a model fits behind the same interface."""

from dataclasses import dataclass, replace
from typing import Protocol

from postroad import Turn
from postroad.demo.actions import (
    Action,
    CallOff,
    CreateHeroTask,
    FollowUp,
    PostHeroSlack,
    SendSms,
    UpdateStage,
)
from postroad.demo.asks import LADDER, Ask, Load


@dataclass(frozen=True, slots=True)
class Pinged:
    """A truck said where it is; its risk of being late is high."""

    event: str
    client: str
    driver: str


@dataclass(frozen=True, slots=True)
class Replied:
    """A driver wrote."""

    event: str
    text: str


@dataclass(frozen=True, slots=True)
class TimerRang:
    """A follow-up is due, for the step after which it was set."""

    event: str
    ask: str
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Something that was sent did not arrive."""

    event: str
    key: str
    kind: str
    error: str


Inbound = Pinged | Replied | TimerRang | Failed


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision, as proposed: why, what to do, and the asks that it opens or changes."""

    reason: str
    actions: tuple[Action, ...] = ()
    asks: tuple[Ask, ...] = ()


class Decider(Protocol):
    """Decides about one event of a turn's load. May take its time; no transaction is open meanwhile.

    What it does besides goes through the turn (`turn.call`), so that a turn which is run again knows of it.
    """

    async def decide(self, turn: Turn, load: Load, inbound: Inbound) -> Plan: ...


class RulePolicy:
    """The standing rules: ask for an ETA when a load is at risk, ask again, then call a person."""

    async def decide(self, turn: Turn, load: Load, inbound: Inbound) -> Plan:
        return plan(turn.subject, load, inbound)


def plan(number: str, load: Load, inbound: Inbound) -> Plan:
    """What the rules make of an event of the load with this number."""
    match inbound:
        case Pinged(event=event, client=client, driver=driver):
            if (ask := load.current) is not None:
                return Plan(f"high risk, but ask {ask.short} is open already")
            return _take_step(number, load.opened(event, client, driver), "the risk is high")
        case Replied(text=text):
            return _settle(number, load.current, text)
        case TimerRang(ask=short, step=step):
            if not load.is_timer_current(short, step):
                return Plan(f"timer of ask {short} after step {step} is stale")
            ask = next(ask for ask in load.asks.values() if ask.short == short)
            return _take_step(number, ask, "no reply")
        case Failed(key=key, kind=kind, error=error):
            title = f"{kind} for load {number} failed ({error}): call the driver"
            return Plan(f"{key} failed", (CreateHeroTask(_cut(title), urgent=True),))


def _take_step(number: str, before: Ask, why: str) -> Plan:
    ask = replace(before, step=before.step + 1)
    reason = f"{why}: ask {ask.short}, step {ask.step} of {len(LADDER)}"
    if LADDER[ask.step - 1] == "create_hero_task":
        task = CreateHeroTask(f"Load {number}: no ETA after {ask.step - 1} SMS, call the driver", True, ask)
        return Plan(reason, (task, UpdateStage("escalated", ask)), (ask,))
    text = f"Load {number}: you may be late. Please reply with your ETA."
    again = text if ask.step == 1 else f"Load {number}: we still need your ETA. Please reply."
    return Plan(reason, (SendSms(ask.driver, again, ask), FollowUp(ask)), (ask,))


def _settle(number: str, ask: Ask | None, text: str) -> Plan:
    said = PostHeroSlack(_cut(f"Load {number}: the driver says: {text}"))
    if ask is None:
        return Plan("the driver wrote unasked", (said,))
    done = replace(ask, open=False)
    called_off = (CallOff(done),) if ask.wait_minutes is not None else ()
    # Keyed by the event, not by the ask's step: the step's own keys are taken.
    told = (*called_off, UpdateStage("eta_confirmed"), said)
    return Plan(f"the driver answered ask {ask.short}", told, (done,))


def _cut(text: str, chars_max: int = 200) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
