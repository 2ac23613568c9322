"""The pump: fires due timers, ends what has expired, rings alerts."""

import sys
from collections.abc import Callable, Sequence

from postroad.engine.calls import contained
from postroad.engine.loop import Loop
from postroad.engine.telemetry import logger
from postroad.model.dispatches import Alert
from postroad.model.failpoints import failpoint
from postroad.store import alerts, settle, timers

BATCH = 500


class Pump(Loop):
    """Timers of every stream and expiries of every kind, whoever declared them."""

    name = "pump"
    topics = ("timers",)

    async def step(self) -> bool:
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
            self.parts.wakeups.announce(("turns",))
        await self._ring()
        return BATCH in (fired.count + fired.dropped, expired)

    async def _ring(self) -> None:
        waiting = await self.parts.database.aread(alerts.unrung, limit=100)
        if not waiting:
            return
        sinks = self.parts.registry.sinks or [to_stderr]
        rung = [number for number, alert in waiting if _ring_all(sinks, alert)]
        # Marked after it rang: a crash in between rings twice, never not at all.
        await self.parts.database.atransact(alerts.mark_rung, rung)


def _ring_all(sinks: Sequence[Callable[[Alert], None]], alert: Alert) -> bool:
    try:
        for sink in sinks:
            contained(sink, alert)
    except Exception:
        logger.exception("an alert sink failed; the alert will ring again")
        return False
    return True


def to_stderr(alert: Alert) -> None:
    """The default sink: one line on stderr."""
    detail = f" {alert.detail}" if alert.detail else ""
    line = f"postroad {alert.severity}: {alert.code} {alert.subject}{detail}"
    sys.stderr.write("".join(c if c.isprintable() else " " for c in line)[:500] + "\n")
