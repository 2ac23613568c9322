"""Crons at work: the loop that sees to it that each has its timer, and what a cron's turn adds to its commit."""

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from postroad.engine.loop import INTERVAL_MAX, Loop, Parts, Step
from postroad.engine.schedules import schedule
from postroad.engine.telemetry import logger
from postroad.model import crons as rules
from postroad.model.crons import CONFIRM_EVERY, Cron, Declared, Fire, Standing
from postroad.model.errors import InvalidInput, TimerConflict
from postroad.model.rows import InboxEvent, NewDispatch, TimerChange, TurnClaim, TurnCommit
from postroad.store import crons


class Scheduler(Loop):
    """Sees once a minute whether the crons that this app declares have their timers.

    One is missing when the cron is new or was cancelled, and a wrong one when it was declared otherwise before. What
    else becomes of timers is part of turns' commits.
    """

    name = "scheduler"
    topics = ()

    def __init__(self, parts: Parts, declared: Sequence[Cron]) -> None:
        super().__init__(parts, interval=INTERVAL_MAX)
        self._crons = declared
        self._looked: int | None = None
        self._noted: set[str] = set()

    async def due(self) -> int | None:
        return self.parts.database.clock.wall() + self._left()

    async def step(self) -> Step:
        if self._left():
            return Step.NOTHING
        database = self.parts.database
        standing = await database.aread(crons.standing, [cron.stream for cron in self._crons])
        armed = [await self._keep(cron, standing[cron.stream]) for cron in self._crons]
        self._looked = database.clock.monotonic()
        if not any(armed):
            return Step.NOTHING
        self.parts.wakeups.announce(("timers",))
        return Step.SOME

    def _left(self) -> int:
        """How long until it is time to look again."""
        if self._looked is None:
            return 0
        return max(0, self._looked + CONFIRM_EVERY - self.parts.database.clock.monotonic())

    async def _keep(self, cron: Cron, standing: Standing) -> bool:
        """See to a cron's timer; whether it was armed."""
        database, since = self.parts.database, self.parts.started
        self._tell(cron, standing)
        decide = partial(_kept, cron, since)
        if decide(standing, database.clock.wall()) is None:
            return False
        try:
            return isinstance(await database.atransact(crons.keep, cron.stream, decide), TimerChange)
        except TimerConflict:  # another process has made it first
            return False

    def _tell(self, cron: Cron, standing: Standing) -> None:
        """Say once in which cron a declaration of this process does not hold."""
        said = ""
        if standing.deleted:
            said = f"its stream {cron.stream} was deleted, so that it never runs; give it another name"
        elif standing.fire is not None:
            theirs, now = standing.fire.declared, self.parts.database.clock.wall()
            if rules.holding(cron.declared(since=self.parts.started, now=now), theirs, now) is theirs:
                said = f"a process that started later has it as {theirs.spec!r} in {theirs.tz}, which holds"
        if said and cron.name not in self._noted:
            self._noted.add(cron.name)
            logger.warning("cron %s: %s", cron.name, said)


def left_out(cron: Cron | None, claim: TurnClaim, *, now: int, since: int) -> dict[str, str]:
    """Which of a claimed set's fires are not run, and why: reasons by event id.

    What has begun, be it given back by a shutdown, is tried again however late that is: it counts when it was told.
    """
    found: dict[str, str] = {}
    if cron is None:
        return found
    for event, fire in _fires(claim.events):
        seen = event.received_at if claim.again else now
        holds, due = _holding(cron, fire, since=since, now=now)
        reason = rules.reason_to_leave(due, holds.missed, fire, seen)
        if reason is not None:
            found[event.event_id] = reason
    return found


def follow(cron: Cron | None, commit: TurnCommit, *, now: int, since: int) -> TurnCommit:
    """The commit of a cron's turn, whatever end it comes to, with the timer for the next fire.

    What it sends belongs to no stream: how a dispatch ended is no reason to run the cron, and one that dies is an
    alert.
    """
    if cron is None:
        return commit
    fires = _fires([*commit.consumed, *commit.dead])
    timers = list(commit.timers)
    if fires and commit.claim.stream not in commit.deletions:
        _, fire = fires[-1]
        holds, due = _holding(cron, fire, since=since, now=now)
        at, skipped = rules.following(due, holds.missed, fire.at, now)
        following = rules.armed(due, cron.name, holds, at, last=fire.at, skipped=skipped)
        timers.append(rules.change(commit.claim.stream, following))
    return replace(commit, timers=timers, dispatches=[_detached(cron, each) for each in commit.dispatches])


def _kept(cron: Cron, since: int, standing: Standing, now: int) -> TimerChange | Fire | None:
    return rules.kept(cron, standing, since=since, now=now)


def _fires(events: Sequence[InboxEvent]) -> list[tuple[InboxEvent, Fire]]:
    """The events of crons' timers among these, and what they say."""
    read = [(event, rules.read(event.data)) for event in events if rules.is_fire(event)]
    return [(event, fire) for event, fire in read if fire is not None]


def _holding(cron: Cron, fire: Fire, *, since: int, now: int) -> tuple[Declared, rules.Schedule]:
    """The declaration that holds, and when it is due."""
    mine = cron.declared(since=since, now=now)
    holds = rules.holding(mine, fire.declared, now)
    if holds.is_as(mine):
        return holds, cron.schedule
    try:
        return holds, schedule(holds.spec, holds.tz)
    except InvalidInput:  # newer than the libraries of this process
        return mine, cron.schedule


def _detached(cron: Cron, dispatch: NewDispatch) -> NewDispatch:
    origin = {"cron": cron.name, **msgspec.json.decode(dispatch.origin)}
    return replace(dispatch, stream="", origin=msgspec.json.encode(origin).decode())
