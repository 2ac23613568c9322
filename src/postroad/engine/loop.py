"""The one lifecycle of all loops: step, wait for a wake-up or the poll interval, back off on errors, end on stop."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from postroad.engine.calls import Calls
from postroad.engine.declarations import Registry
from postroad.engine.folding import Folding
from postroad.engine.leases import Keeper
from postroad.engine.looks import Looks
from postroad.engine.partials import Partials
from postroad.engine.telemetry import Telemetry, logger
from postroad.engine.wakeups import Topic, Wakeups
from postroad.model.clock import SECOND
from postroad.model.entropy import Entropy
from postroad.model.errors import InvalidInput
from postroad.model.retention import Retention
from postroad.model.retry import Retry
from postroad.store.database import Database

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

R = TypeVar("R")
POLL = SECOND // 4
INTERVAL_MAX = 30 * SECOND
STALLS_MAX = 64
ENDLESS = 2**63
AT_ONCE = 0
IDLE_AFTER = 8  # looks in a row that found nothing
IDLE_TIMES = 4  # how much rarer an idle loop looks, since wake-ups are heard and what is to come is known
TROUBLE = Retry(attempts=1, first=0.1, cap=5, jitter=True)


@dataclass(slots=True, kw_only=True)
class Parts:
    """What all loops of a process share."""

    post: "Postroad"
    registry: Registry
    database: Database
    entropy: Entropy
    telemetry: Telemetry
    wakeups: Wakeups
    calls: Calls
    keeper: Keeper
    partials: Partials
    folding: Folding
    poll: int = POLL
    retention: Retention | None = None  # None: nothing goes by itself
    counts: Counter[str] = field(default_factory=Counter)
    started: int = 0  # when the process did, by the database's clock
    ending: threading.Event = field(default_factory=threading.Event)  # the process was told to end
    looks: Looks = field(init=False)

    def __post_init__(self) -> None:
        self.looks = Looks(self.database, self.entropy)

    def count(self, name: str, by: int = 1) -> None:
        """Count what happened, for `drain` and for whoever observes."""
        self.counts[name] += by


class Stalls:
    """Notices that the database has not answered us for a while: it was away, we were paused, or the clock jumped.

    After such a stall live workers are about to renew and settle; whoever took over their expired claims at
    once would do their work twice.
    """

    def __init__(self, database: Database) -> None:
        self._clock = database.clock
        # When and for how long; a longer one makes the shorter ones before it irrelevant.
        self._stalls: list[tuple[int, int]] = []
        self._answered, self._wall = self._clock.monotonic(), self._clock.wall()

    def silent(self) -> int:
        """How long ago the database answered last."""
        return self._clock.monotonic() - self._answered

    def look(self) -> None:
        """Before a claim: see how long ago the database answered last."""
        steady, wall = self._clock.monotonic(), self._clock.wall()
        silent = steady - self._answered
        length = max(silent, abs((wall - self._wall) - silent))
        while self._stalls and self._stalls[-1][1] <= length:
            self._stalls.pop()
        self._stalls.append((steady, length))
        del self._stalls[:-STALLS_MAX]

    def answered(self) -> None:
        """After a transaction: the database is there. The transaction itself may have waited for it."""
        self.look()
        self._answered, self._wall = self._clock.monotonic(), self._clock.wall()

    def may_take_over(self, lease: int) -> bool:
        """Whether expired claims with this lease may be taken from their claimants by now."""
        now = self._clock.monotonic()
        return not any(length > lease // 6 and now - at < lease // 3 for at, length in self._stalls)


def waited_little(asked: int, now: int, lease: int) -> bool:
    """Whether a transaction got its lock soon after it was asked for, measured by the lease it is about."""
    return abs(now - asked) <= lease // 6


class Step(IntEnum):
    """What a step came to."""

    NOTHING = 0
    SOME = 1
    """It found something to do."""
    MORE = 2
    """It did as much as it may at once: there may be more."""


class Loop:
    """A loop differs from the others only in `due` and `step`, and in what it must finish before it ends."""

    name: str
    topics: tuple[Topic, ...]

    def __init__(self, parts: Parts, *, interval: int | None = None) -> None:
        self.parts = parts
        self.interval = parts.poll if interval is None else interval
        if not 0 < self.interval <= INTERVAL_MAX:
            raise InvalidInput(
                f"The interval of the {self.name} must be above 0 and at most 30 s, got {self.interval / SECOND} s.",
                field="interval",
            )
        # A silence of a sixth of a lease is taken for a stall, in which nothing is taken over. A loop that looked
        # less often than that would never take over a claim at all.
        looks = [lease // 8 for lease in self.leases()]
        self.interval = min([self.interval, *looks])
        self._unproven_max = min(looks, default=ENDLESS)
        self._rarely = min(self.interval * IDLE_TIMES, self._unproven_max)
        self._silent_max = min((lease // 7 for lease in self.leases()), default=ENDLESS)
        # Whoever has something to settle must be back before others take over, a third of a lease after a stall.
        self._patience = min([TROUBLE.cap, *looks])
        self.stalls = Stalls(parts.database)
        self._woken = asyncio.Event()
        self._failures = 0
        self._certain = False  # that a step finds something
        self._next = ENDLESS  # how long after the last look something is due
        self._empty = 0  # looks in a row that found nothing
        self._idle = False  # it waits for the moment at which all look that are idle

    def leases(self) -> Iterable[int]:
        """How long the claims are that this loop takes, in microseconds."""
        return ()

    async def due(self) -> int | None:
        """When a step may find anything to do; None: never, as far as is known. Asked without a writing transaction."""
        raise NotImplementedError

    async def step(self) -> Step:
        """Do what is due."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Wait until what has begun is done."""

    async def linger(self, seconds: float) -> None:
        """At the very end, wait at most so long for what was given up and still runs; hear of nothing afterwards."""

    def abandon(self, why: str) -> None:
        """End what has begun and could not be waited for any longer."""

    def wake(self) -> None:
        """Look now. Only from the loop's own thread."""
        self._woken.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Step until `stop` is set; errors are reported, backed off from, and never end the loop."""
        loop = asyncio.get_running_loop()
        end = self.parts.wakeups.subscribe(self.topics, lambda: _soon(loop, self._woken))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                self._woken.clear()
                await self._pause(stopping, await self._stepped())
        finally:
            self.parts.ending.set()
            end()
            stopping.cancel()

    async def _stepped(self) -> int:
        """Step once; how long to wait afterwards, in microseconds."""
        try:
            stepped = await self.step() if await self._may_find() else Step.NOTHING
        except Exception as error:
            self._failures += 1
            self._idle = False
            self.parts.telemetry.emit("loop.error", loop=self.name, error=error, failures=self._failures)
            log = logger.exception if self._failures == 1 else logger.warning
            log("%s: step failed (%d in a row): %s", self.name, self._failures, error)
            delay = TROUBLE.delay(self._failures, self.parts.entropy.fraction())
            return self.interval + min(delay, self._patience)
        if self._failures:
            logger.info("%s: working again after %d failures", self.name, self._failures)
            self._failures = 0
        self._certain = stepped is Step.MORE
        return 0 if self._certain else self._wait()

    async def _may_find(self) -> bool:
        """Whether to step. Where we know that there is something, asking costs more than it saves.

        What was asked proves nothing of a database in which all that writes has to wait, and a loop without room asks
        nothing: only a step shows a stall, so there is one as often as stalls must be noticed.
        """
        self._next = ENDLESS
        unproven = self._unproven()
        if self._certain or (unproven and not self._idle):
            self._next = self.interval // 8  # what is to come is not known: look soon, but not after every step
            if self._certain:
                self._empty = 0
            return True
        at = await self.due()
        self._next = ENDLESS if at is None else at - self.parts.database.clock.wall()
        self._empty = 0 if self._next <= 0 else self._empty + 1
        return unproven or self._next <= 0

    def _unproven(self) -> bool:
        """Whether to step if only to show a stall: an idle loop does where the next time it looks would be too late."""
        silent = self.stalls.silent()
        return silent + self._rarely > self._silent_max if self._idle else silent >= self._unproven_max

    def _wait(self) -> int:
        """How long to wait after a step, in microseconds: not beyond what is known to come."""
        pause = round(self.interval * (0.8 + 0.4 * self.parts.entropy.fraction()))
        self._idle = False
        if self._empty >= IDLE_AFTER and self.parts.wakeups.hearing:
            rest = self.parts.looks.wait(self._rarely)
            self._idle = self.stalls.silent() + rest <= self._silent_max
            pause = rest if self._idle else pause
        return min(pause, self._next) if self._next > 0 else pause

    async def _read(self, fn: Callable[..., R], *args: Any) -> R:
        """Ask when something is due: an idle loop does together with the others that are."""
        return await (self.parts.looks.read(fn, *args) if self._idle else self.parts.database.aread(fn, *args))

    async def _pause(self, stopping: asyncio.Future[Any], length: int) -> None:
        if length == 0 or (self._woken.is_set() and not self._failures):
            self._certain = self._certain or self._told()
            await asyncio.wait({stopping}, timeout=0)
            return
        waiting: asyncio.Future[Any] = asyncio.ensure_future(self._woken.wait())
        watched = [stopping] if self._failures else [stopping, waiting]
        await asyncio.wait(watched, timeout=length / SECOND, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._certain = self._told()

    def _told(self) -> bool:
        """Whether we were woken for something. On SQLite that says only that the file has changed."""
        return self._woken.is_set() and not self.parts.database.is_sqlite


def _soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
