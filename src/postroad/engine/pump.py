"""The pump: fires due timers, ends what has expired, rings alerts; what is old goes when all that is done."""

import asyncio

from postroad.engine.loop import AT_ONCE, Loop, Parts, Step
from postroad.engine.sinks import Ringer
from postroad.engine.sweep import Sweep
from postroad.model.failpoints import failpoint
from postroad.store import due, settle, timers

BATCH = 500
# How long a step waits for sinks: timers do not wait for a slow one.
RINGING_SECONDS = 0.5


class Pump(Loop):
    """Timers of every stream and expiries of every kind, whoever declared them."""

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
        known = await self.parts.database.aread(due.moments)
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
        expired = await database.atransact(settle.expire, limit=BATCH)
        if expired:
            self.parts.count("expired", expired)
            self.parts.wakeups.announce(("turns", "sends"))  # the next ones of their lanes may go
        await self._ring(RINGING_SECONDS)
        await self._sweep.step()
        if BATCH in (fired.count + fired.dropped, expired):
            return Step.MORE
        return Step.SOME if fired.count or fired.dropped or expired else Step.NOTHING

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
