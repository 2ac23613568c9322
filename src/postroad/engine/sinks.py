"""Ringing alerts: every sink is told of every alert, and one that fails hinders no other."""

import asyncio
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from postroad.engine.calls import Abort, Aborted, CallResult, Raised, Returned, TimedOut, run_call
from postroad.engine.loop import Parts
from postroad.engine.telemetry import logger, traced
from postroad.model.clock import SECOND
from postroad.model.dispatches import Alert
from postroad.model.failpoints import failpoint
from postroad.model.payload import safe_error
from postroad.model.retry import Retry
from postroad.store import alerts

PAGE = 100
PAGES_MAX = 100
SINK_TIMEOUT = 10 * SECOND
# Without jitter: nobody else waits for the same sink.
SINK_REST = Retry(attempts=1, first=1, cap=60, jitter=False)


@dataclass(slots=True)
class _Sink:
    """Where alerts go, which of the waiting ones it has taken, and until when it is left alone (monotonic)."""

    fn: Callable[[Alert], None]
    told: set[int] = field(default_factory=set)
    failures: int = 0
    resting: int = 0


class Ringer:
    """Tells the sinks of alerts. In this process a sink that took an alert is not told of it again.

    One that fails is left alone for a while, longer each time; the alerts that it missed stay unrung for it.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sinks: list[_Sink] = []
        self._seen = 0  # the last alert that all sinks but the resting ones were told of
        self._abort: Abort | None = None

    def abandon(self, why: str) -> None:
        """Wait for no sink any longer."""
        if self._abort is not None and not self._abort.done():
            self._abort.set_result(why)

    async def ring(self) -> None:
        """Tell whoever can be told now, and mark what all have taken."""
        self._look()
        now = self._parts.database.clock.monotonic()
        failing = [sink for sink in self._sinks if sink.failures]
        # What only resting sinks miss is not read again before one of them is due.
        if not failing or any(sink.resting <= now for sink in failing):
            self._seen = 0
        for _ in range(PAGES_MAX):
            waiting = await self._parts.database.aread(alerts.unrung, after=self._seen, limit=PAGE)
            if waiting:
                await self._tell(waiting)
                self._seen = waiting[-1][0]
            if len(waiting) < PAGE or (self._abort is not None and self._abort.done()):
                return

    def _look(self) -> None:
        """Sinks may be declared while the loops run."""
        known = [sink.fn for sink in self._sinks]
        fns = self._parts.registry.sinks or [to_stderr]
        if known != fns:
            old = dict(zip(known, self._sinks, strict=True))
            self._sinks = [old.get(fn) or _Sink(fn) for fn in fns]

    async def _tell(self, waiting: list[tuple[int, Alert]]) -> None:
        rung = [number for number, alert in waiting if await self._all_told(number, alert)]
        # Marked after it rang: a crash in between rings twice, never not at all.
        if rung:
            failpoint("alert.after_ring")
            await self._parts.database.atransact(alerts.mark_rung, rung)
            for sink in self._sinks:
                sink.told.difference_update(rung)

    async def _all_told(self, number: int, alert: Alert) -> bool:
        for sink in self._sinks:
            if number not in sink.told and sink.resting <= self._parts.database.clock.monotonic():
                await self._call(sink, number, alert)
        return all(number in sink.told for sink in self._sinks)

    async def _call(self, sink: _Sink, number: int, alert: Alert) -> None:
        if self._abort is None:
            self._abort = asyncio.get_running_loop().create_future()
        result = await run_call(self._parts.calls, sink.fn, alert, timeout=SINK_TIMEOUT, abort=self._abort)
        said = _failure(result)
        if said is None:
            sink.told.add(number)
            sink.failures = sink.resting = 0
            return
        sink.failures += 1
        sink.resting = self._parts.database.clock.monotonic() + SINK_REST.delay(sink.failures, 1)
        # The trace once, not per attempt.
        told = said if sink.failures == 1 else said.splitlines()[-1]
        logger.error("an alert sink failed (%d in a row); it will be told again: %s", sink.failures, told)


def _failure(result: CallResult) -> str | None:
    """What went wrong in a sink; None: it took the alert."""
    match result:
        case Returned(value) if inspect.iscoroutine(value):
            value.close()
            return "the sink is async: nothing awaits it"
        case Returned():
            return None
        case Raised(error):
            return f"{traced(error)}\n{safe_error(error)}"
        case TimedOut():
            return f"timeout after {SINK_TIMEOUT / SECOND:g} s"
        case Aborted(why):
            return why


def to_stderr(alert: Alert) -> None:
    """The default sink: one line on stderr."""
    detail = f" {alert.detail}" if alert.detail else ""
    line = f"postroad {alert.severity}: {alert.code} {alert.subject}{detail}"
    sys.stderr.write("".join(c if c.isprintable() else " " for c in line)[:500] + "\n")
