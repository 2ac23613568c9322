"""Plays scenarios: an app's own worker, dispatcher and pump, in virtual time, held against expectations."""

import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from postroad.agent import scenarios
from postroad.agent.happenings import Happenings, Seen, mismatches, timeline
from postroad.agent.scenarios import BadScenario, Expect, Fail, Other, Refire, Scenario, Step
from postroad.engine.app import Postroad
from postroad.engine.declarations import Sender
from postroad.model.clock import FakeClock
from postroad.model.errors import GiveUp, OutcomeUnknown, RetryLater, Span
from postroad.model.events import TIMER_FIRED_NAME
from postroad.model.ids import timer_event_id
from postroad.model.payload import encode
from postroad.model.rows import DispatchClaim, NewEvent, Settlement
from postroad.store import dispatch_claims, inbox, settle
from postroad.store.database import Database


class Bench(Protocol):
    """What postroad.testing.Harness offers: an app on a database, worked in virtual time."""

    @property
    def post(self) -> Postroad: ...
    @property
    def clock(self) -> FakeClock: ...
    def drain(self) -> object: ...
    def advance(self, by: Span) -> object: ...
    def fail(self, kind: str, error: Exception, *, times: int = 1) -> None: ...


OpenBench = Callable[[Postroad, datetime], AbstractContextManager[Bench]]


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a scenario: the expectations that were not met, and all that happened."""

    name: str
    failures: Sequence[str]
    timeline: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        if self.passed:
            return f"ok    {self.name}"
        said = [f"FAIL  {self.name}", *(f"      {line}" for line in self.failures), "      timeline:"]
        return "\n".join([*said, *(f"      {line}" for line in self.timeline)])


def play(scenario: Scenario, open_bench: OpenBench) -> Report:
    """Play a scenario to its end, or to the first step whose expectation is not met.

    `open_bench(app, at)` opens an app at a moment; each time on the same database, which is empty at first.
    """
    with ExitStack() as stack:
        stage = _Stage(open_bench, stack)
        stage.open(scenario.app, scenarios.start(scenario))
        for step in scenario.steps:
            try:
                failures = stage.play(step)
            except Exception as error:
                failures = [f"the step at {step.at} raised", *"".join(traceback.format_exception(error)).splitlines()]
            if failures:
                return Report(scenario.name, failures, stage.timeline)
        return Report(scenario.name, (), stage.timeline)


@dataclass(slots=True)
class _Stage:
    """A scenario under way."""

    open_bench: OpenBench
    stack: ExitStack
    happenings: Happenings = field(default_factory=Happenings)
    timeline: list[str] = field(default_factory=list)
    unseen: Seen = field(default_factory=Seen)
    claimed: list[DispatchClaim] = field(default_factory=list)
    _bench: Bench | None = None

    @property
    def bench(self) -> Bench:
        assert self._bench is not None, "an app is open while a scenario is played"
        return self._bench

    @property
    def database(self) -> Database:
        return self.bench.post.database

    def open(self, app: str, at: datetime) -> None:
        """Close the app that is open, if there is one, and open another one on the same database."""
        self.stack.close()
        self._bench = self.stack.enter_context(self.open_bench(_app(app), at))

    def play(self, step: Step) -> list[str]:
        """Play one step; what was expected and is not so."""
        self._reach(step)
        self._act(step)
        if not step.outage:
            self.bench.drain()
        self._look()
        if step.expect is None:
            return []
        failures = self._judge(step.expect)
        self.unseen = Seen()
        return [f"at {self.bench.clock.now:%Y-%m-%d %H:%M:%S}: {failure}" for failure in failures]

    def _reach(self, step: Step) -> None:
        by = scenarios.moment(step.at, self.bench.clock.now) - self.bench.clock.now
        if by < timedelta(0):
            raise BadScenario(f"{step.at} is over: it is {self.bench.clock.now.isoformat()}.")
        if step.outage:
            self.bench.clock.advance(by)
        else:
            self.bench.advance(by)
        self._look()

    def _act(self, step: Step) -> None:
        if step.deploy:
            self._note(f"deploy {step.deploy}")
            self.open(step.deploy, self.bench.clock.now)
        for failing in step.fail:
            self.bench.fail(failing.kind, _error(failing), times=failing.times)
        if step.other is not None:
            self._other(step.other)
        with self.bench.post.begin() as tx:
            for sent in step.send:
                tx.send(sent.kind, sent.body, to=sent.to, key=sent.key)
            for event in step.publish:
                self._note(f"publish {event.stream} {event.kind} {event.key}")
            for armed in step.rearm:
                tx.rearm_timer(armed.timer, after=armed.after, data=armed.data, stream=armed.stream)
        self.database.transact(_publish, list(_events(step)))

    def _other(self, other: Other) -> None:
        """Be another dispatcher, through the same store verbs."""
        if other.claim:
            policy = self._sender(other.claim).policy
            found = self.database.transact(
                dispatch_claims.claim, policy, names=[other.claim], token="another dispatcher", limit=100
            )
            self.claimed.extend(found.claims)
            self._note(f"another dispatcher claims {', '.join(claim.key for claim in found.claims)}")
        if other.settle:
            results = [
                Settlement(
                    id=claim.id, token=claim.token, attempt=claim.attempt, result=other.settle,
                    policy=self._sender(claim.kind).policy, error="" if other.settle == "ok" else "refused",
                )
                for claim in self.claimed
            ]  # fmt: skip
            self._note(f"the other dispatcher comes to an end: {other.settle}")
            self.database.transact(settle.settle, results)
            self.claimed = []

    def _sender(self, kind: str) -> Sender:
        declared = self.bench.post.declared(kind)
        if not isinstance(declared, Sender):
            raise BadScenario(f"this app does not send {kind}.")
        return declared

    def _note(self, text: str) -> None:
        self.timeline.append(f"{self.bench.clock.now:%m-%d %H:%M:%S}  * {text}")

    def _look(self) -> None:
        seen = self.database.read(self.happenings.new)
        self.timeline.extend(timeline(seen))
        self.unseen.add(seen)

    def _judge(self, expect: Expect) -> list[str]:
        waits = {stream: self.database.read(inbox.waiting, stream) for stream in expect.inbox}
        return mismatches(expect, self.unseen, waits, self.bench.clock.now)


def _app(reference: str) -> Postroad:
    module, _, attribute = reference.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise BadScenario(f"app {reference!r} is not `module:attribute` of a function: {error}") from error
    if not isinstance(made, Postroad):
        raise BadScenario(f"app {reference!r} did not make a Postroad.")
    return made


def _events(step: Step) -> Iterator[NewEvent]:
    for event in step.publish:
        yield NewEvent(
            stream=event.stream,
            event_id=event.key,
            kind=event.kind,
            version=event.version,
            data=encode(event.data),
        )
    for timer in step.refire:
        yield _fired(timer)


def _fired(timer: Refire) -> NewEvent:
    return NewEvent(
        stream=timer.stream,
        event_id=timer_event_id(timer.timer, 0),
        kind=TIMER_FIRED_NAME,
        data=encode(timer.data),
    )


def _publish(conn: Any, events: list[NewEvent], *, now: int) -> None:
    inbox.publish(conn, events, now=now)


def _error(fail: Fail) -> Exception:
    match fail.how:
        case "retry_later":
            return RetryLater(fail.error)
        case "unknown":
            return OutcomeUnknown(fail.error)
        case _:
            return GiveUp(fail.error)
