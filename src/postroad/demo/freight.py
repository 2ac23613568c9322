"""The freight agent as an app: its turn, its filters, its senders."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from postroad import OUTCOME, TIMER_FIRED, Dispatch, Entry, Event, Fold, Handlers, Kind, Postroad, Retry, Turn
from postroad.demo.actions import (
    Action,
    CallOff,
    CreateHeroTask,
    FollowUp,
    PostHeroSlack,
    SendSms,
    UpdateStage,
    objection,
)
from postroad.demo.asks import Load, action_key, timer_key
from postroad.demo.kinds import (
    DECISION,
    FIRST,
    HERO,
    REPLY,
    SECOND,
    SLACK,
    STAGE,
    Decision,
    HeroTask,
    Refusal,
    Release,
    SlackPost,
    Stage,
    is_risky,
)
from postroad.demo.policy import Decider, Failed, Inbound, Pinged, Plan, Replied, RulePolicy, TimerRang

STREAM_TYPE = "load"
TURN_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in seconds: production's, or the demo's scaled ones."""

    minute_seconds: float = 60
    retry: Retry = Retry.QUICK
    timeout: float = 10
    lease: float = 90


class Carrier(Protocol):
    """Hands a dispatch to the service at a path, under its key; raises RetryLater or GiveUp."""

    async def deliver(self, path: str, dispatch: Dispatch[Any]) -> str: ...


def fold_decision(load: Load, entry: Entry) -> Load:
    """The load after an entry of its log."""
    decision = DECISION.of(entry)
    return load if decision is None else load.after(decision.asks)


LOAD = Fold("load", Load, fold_decision)


class Agent:
    """Decides for loads, with the kinds of one release."""

    def __init__(self, release: Release, decider: Decider, pace: Pace) -> None:
        self.release = release
        self.decider = decider
        self.pace = pace

    def inbound(self, event: Event) -> Inbound | None:
        """What an event means; None for what the agent has no use for."""
        if (ping := self.release.ping.of(event)) is not None:
            return Pinged(event.key, ping.client, ping.driver)
        if (reply := REPLY.of(event)) is not None:
            return Replied(event.key, reply.text)
        if (timer := TIMER_FIRED.of(event)) is not None:
            return TimerRang(event.key, timer["ask"], timer["step"])
        if (outcome := OUTCOME.of(event)) is not None:
            return Failed(event.key, outcome.key, outcome.kind, outcome.error or outcome.reason)
        return None

    async def decide(self, turn: Turn) -> None:
        """Decide about each event in turn, each on top of what was decided before it."""
        load = turn.fold(LOAD)
        for event in turn.events:
            inbound = self.inbound(event)
            if inbound is None:
                continue
            plan = await self.decider.decide(turn, load, inbound)
            decision = self.carry_out(turn, event, plan)
            load = load.after(decision.asks)

    def carry_out(self, turn: Turn, event: Event, plan: Plan) -> Decision:
        """Record a decision with what it causes; what the gate refuses becomes a Hero task that says why."""
        keys, refused = [], []
        for action in plan.actions:
            if (reason := objection(action)) is None:
                keys.append(self.act(turn, event, action))
            else:
                refused.append(Refusal(type(action).__name__, reason))
        task = action_key(turn.subject, event.key, HERO.name)
        if refused and task not in keys:
            said = "; ".join(f"{r.action} refused, {r.reason}" for r in refused)
            turn.send(HERO, HeroTask(f"Load {turn.subject}: {said}"[:200], urgent=True), to="hero", key=task)
            keys.append(task)
        decision = Decision(event.key, plan.reason, keys, refused, list(plan.asks))
        turn.record(DECISION, decision)
        return decision

    def act(self, turn: Turn, event: Event, action: Action) -> str:
        """Carry an action into the turn's commit; its key."""
        match action:
            case FollowUp(about=ask):
                wait = timedelta(seconds=(ask.wait_minutes or 0) * self.pace.minute_seconds)
                key = timer_key(turn.subject, ask)
                turn.set_timer(key, after=wait, data={"ask": ask.short, "step": ask.step})
                return key
            case CallOff(about=ask):
                turn.cancel_timer(timer_key(turn.subject, ask))
                return f"cancel {timer_key(turn.subject, ask)}"
        kind, body, to = self.message(turn.subject, action)
        key = action_key(turn.subject, action.about or event.key, kind.name)
        turn.send(kind, body, to=to, key=key)
        return key

    def message(
        self, number: str, action: SendSms | CreateHeroTask | PostHeroSlack | UpdateStage
    ) -> tuple[Kind[Any], object, str]:
        """The kind, body and destination of what an action sends."""
        match action:
            case SendSms(to=to, text=text):
                return self.release.sms, self.release.sms_body(text), to
            case CreateHeroTask(title=title, urgent=urgent):
                return HERO, HeroTask(title, urgent), "hero"
            case PostHeroSlack(text=text):
                return SLACK, SlackPost(text), "#hero"
            case UpdateStage(stage=stage):
                return STAGE, Stage(stage), number


def replace_duplicate(turn: Turn, key: str) -> None:
    """Replace a decision whose dispatch key exists already by a Hero task keyed by the event."""
    for event in turn.events:
        task = action_key(turn.subject, event.key, HERO.name)
        said = f"Load {turn.subject}: the key {key} was used before; look at {event.key} yourself"
        turn.send(HERO, HeroTask(said[:200], urgent=True), to="hero", key=task)
        turn.record(DECISION, Decision(event.key, f"duplicate key {key}: a person takes over", [task]))


def handlers(
    release: Release,
    *,
    decider: Decider | None = None,
    pace: Pace | None = None,
    carrier: Carrier | None = None,
    sends: bool = True,
) -> Handlers:
    """Everything the agent declares: the turn of a load, what needs no decision, and who carries out what.

    `sends` False leaves the carrying out to another app on the same database.
    """
    declared = Handlers()
    pace = pace or Pace()
    agent = Agent(release, decider or RulePolicy(), pace)
    declared.turn(STREAM_TYPE, timeout=TURN_SECONDS, on_duplicate=replace_duplicate)(agent.decide)
    _filter(declared, release)
    if sends:
        _send(declared, release, pace, carrier or Nowhere())
    else:
        declared.elsewhere(release.sms, HERO, SLACK, STAGE)
    return declared


def _filter(declared: Handlers, release: Release) -> None:
    @declared.filter(STREAM_TYPE, release.ping)
    def calm(event: Event) -> str | None:
        ping = release.ping.of(event)
        return "the risk is low" if ping is not None and not is_risky(ping) else None

    @declared.filter(STREAM_TYPE, OUTCOME)
    def arrived(event: Event) -> str | None:
        outcome = OUTCOME.of(event)
        return outcome.status if outcome is not None and outcome.status in ("delivered", "acked") else None


def _send(declared: Handlers, release: Release, pace: Pace, carrier: Carrier) -> None:
    def at(path: str) -> Callable[[Dispatch[Any]], Awaitable[str]]:
        async def deliver(dispatch: Dispatch[Any]) -> str:
            return await carrier.deliver(path, dispatch)

        return deliver

    common: dict[str, Any] = {"timeout": pace.timeout, "lease": pace.lease, "retry": pace.retry}
    declared.sender(release.sms, **common)(at("/sms"))
    # The Hero team's own tools and internal work: their failure must not create more work for the same tools.
    own: tuple[tuple[Kind[Any], str], ...] = ((HERO, "/hero"), (SLACK, "/slack"), (STAGE, "/stage"))
    for kind, path in own:
        declared.sender(kind, on_failure="alert", **common)(at(path))


class Nowhere:
    """The carrier of evals and tests, which capture what is sent."""

    async def deliver(self, path: str, dispatch: Dispatch[Any]) -> str:
        return f"{path} {dispatch.key}"


def release_1() -> Postroad:
    """The first release, without a database: for the Harness and for evals."""
    return _app(FIRST)


def release_1_deciding_only() -> Postroad:
    """The first release with no dispatcher: what is decided waits for one."""
    post = Postroad()
    post.include(handlers(FIRST, sends=False))
    return post


def release_2() -> Postroad:
    """The second release: LocationPing and send_sms in version 2."""
    return _app(SECOND)


def _app(release: Release) -> Postroad:
    post = Postroad()
    post.include(handlers(release))
    return post
