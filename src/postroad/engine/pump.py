"""The pump: fires due timers, ends what has expired or timed out, rings alerts; what is old goes after all that."""

import asyncio

from sqlalchemy import Connection

from postroad.engine.loop import AT_ONCE, Loop, Parts, Step
from postroad.engine.sinks import Ringer
from postroad.engine.sweep import Sweep
from postroad.model.failpoints import failpoint
from postroad.store import delegations, due, settle, timers

BATCH = 500
# How long a step waits for sinks: timers do not wait for a slow one.
RINGING_SECONDS = 0.5


def end_overdue(conn: Connection, *, limit: int, now: int) -> tuple[int, int]:
    """End at most `limit` dispatches that have expired, and delegations that have timed out; how many of each."""
    return settle.expire(conn, limit=limit, now=now), delegations.expire(conn, limit=limit, now=now)


class Pump(Loop):
    """Timers of every stream, expiries of every kind and deadlines of all delegations, whoever declared them."""

    name = "pump"
    topics = ("timers",)

    def __init__(self, parts: Parts, *, interval: int | None = None) -> None:
        super().__init__(parts, interval=interval)
        self._ringer = Ringer(parts)
        self._ringing: asyncio.Task[None] | None = None
        self._sweep = Sweep(parts)

    async def due(self) -> int | None:
        if self._ringing is not None:
            return AT_ONCE
        known = await self._read(due.moments)
        wait = self._sweep.wait()
        sweep = None if wait is None else self.parts.database.clock.wall() + wait
        return min((at for at in (known, sweep) if at is not None), default=None)

    async def step(self) -> Step:
        database = self.parts.database
        fired = await database.atransact(timers.fire, limit=BATCH)
        failpoint("timer.after_commit")
        if fired.count:
            self.parts.count("timers", fired.count)
            self.parts.telemetry.emit("timers.fired", count=fired.count, lag=fired.lag)
            self.parts.wakeups.announce(("turns",))
        expired, timed_out = await database.atransact(end_overdue, limit=BATCH)
        if timed_out:
            self.parts.telemetry.emit("delegations.timed_out", count=timed_out)
            self.parts.wakeups.announce(("turns",))
        if expired:
            self.parts.count("expired", expired)
            self.parts.wakeups.announce(("turns", "sends"))  # the next ones of their lanes may go
        await self._ring(RINGING_SECONDS)
        await self._sweep.step()
        done = (fired.count + fired.dropped, expired, timed_out)
        return Step.MORE if BATCH in done else Step.SOME if any(done) else Step.NOTHING

    async def finish(self) -> None:
        if self._ringing is not None:
            await self._ring(None)

    def abandon(self, why: str) -> None:
        self._ringer.abandon(why)

    async def _ring(self, seconds: float | None) -> None:
        """Tell the sinks, in a task of its own that outlives a step if they are slow."""
        if self._ringing is None:
            self._ringing = asyncio.ensure_future(self._ringer.ring())
        ringing = self._ringing
        await asyncio.wait({ringing}, timeout=seconds)
        if ringing.done():
            self._ringing = None
            ringing.result()
