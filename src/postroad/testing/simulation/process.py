"""A simulated process: an app with its real loops over its own connections, which may die at any statement."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from postroad.engine.app import Postroad
from postroad.engine.listener import Listener
from postroad.engine.loop import Parts
from postroad.engine.running import Runtime
from postroad.engine.wakeups import Topic, Wakeups
from postroad.model.clock import SECOND, FakeClock
from postroad.model.dispatches import Alert, Dispatch
from postroad.model.entropy import SeededEntropy
from postroad.store.database import Database
from postroad.testing.simulation.connections import Shelf
from postroad.testing.simulation.ledger import ReportCall
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.outages import Outages
from postroad.testing.simulation.stepped import SteppedCalls, SteppedDatabase, SteppedHub, SteppedKeeper
from postroad.testing.simulation.toolbox import Handled, Who
from postroad.testing.simulation.toolbox import World as Tools
from postroad.testing.simulation.workload import SECRET, Message, Outside, declare

CURRENT: ContextVar["Process | None"] = ContextVar("simulated process", default=None)


class Crash(BaseException):
    """A simulated process has died here. Not an Exception: nothing in the product may catch it and go on."""


class World(Protocol):
    """What a process needs of the world around it."""

    options: Options
    clock: FakeClock
    url: str
    outages: Outages
    shelf: Shelf

    def note(self, what: str) -> None:
        """Write a line of the run's log."""

    def at_statement(self, process: "Process", sql: str) -> None:
        """A statement of the process is about to run: may raise Crash."""

    def at_send(self, process: "Process", when: str) -> None:
        """A message is about to arrive, or has arrived: may raise Crash."""

    def latency(self) -> float:
        """How long the database takes to hear, or to answer, in seconds."""

    def gathers(self) -> float:
        """How long the writer is busy before it begins the next group, in seconds."""

    def grouped(self, process: "Process", members: int) -> None:
        """The process is about to write so many members in one transaction."""

    def arrived(self, process: "Process", dispatch: Dispatch[Message]) -> None:
        """A message has arrived."""

    def tried(self, stream: str, turn: str, attempt: int) -> None:
        """A handler was called."""

    def handled(self, handled: Handled) -> None:
        """A handler was called with these events."""

    def asked(self, tool: str, name: str) -> int:
        """A tool was called with this name; how often it was by now."""

    def happened(self, process: "Process", who: Who, tool: str, name: str, key: str) -> int:
        """A tool does its work: may raise Crash before and after."""

    def telling(self, call: ReportCall) -> AbstractContextManager[None]:
        """A turn reports something within this."""

    def rang(self, alert: Alert) -> None:
        """An alert has rung."""

    def hint(self, process: "Process", topics: frozenset[Topic]) -> None:
        """The process has committed something that wakes loops."""

    def saw(self, process: "Process", name: str, values: Mapping[str, Any]) -> None:
        """The product's telemetry said something."""

    def died(self, process: "Process", where: str) -> None:
        """The process has died and will be buried."""


class Hints(Listener):
    """Carries announcements to the other processes of this world, if its seed has such hints."""

    def __init__(self, database: Database, wakeups: Wakeups, process: "Process") -> None:
        super().__init__(database, wakeups)
        self._process = process
        self._own_wakeups = wakeups
        self._end_relay: Callable[[], None] | None = None

    def start(self) -> None:
        process = self._process
        self._end_relay = self._own_wakeups.relay(lambda topics: process.world.hint(process, topics))

    def close(self) -> None:
        if self._end_relay is not None:
            self._end_relay()
            self._end_relay = None


class Process:
    """One life of a process: `run` until it is told to stop, or until it dies."""

    def __init__(self, world: World, *, name: str, life: str, seed: int, faxes: bool) -> None:
        self.world = world
        self.name = name
        self.life = life
        self.dead = False
        self.stop = asyncio.Event()
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.paused_until = 0
        self.paused_over = ("", "")
        self.database = SteppedDatabase(world.url, clock=world.clock, place=self)
        self.post = Postroad(world.url, secret_key=SECRET)
        outside = Outside(
            reach=self._reach, arrive=self._arrive, tried=world.tried, ring=world.rang, alive=lambda: not self.dead,
            handled=world.handled, telling=world.telling,
            tools=Tools(world.asked, self._happen) if world.options.tools else None,
        )  # fmt: skip
        declare(self.post, world.options, outside, faxes=faxes)
        self.post._opened = self.database
        self.post._hub = SteppedHub(self.database, self.post._wakeups)
        self.post.entropy = SeededEntropy(seed)
        self.post.observe(lambda event, values: world.saw(self, event, values))
        self.parts = self._parts()
        self.runtime = Runtime(self.parts, grace=round(world.options.grace * SECOND))
        self.runtime._listener = Hints(self.database, self.parts.wakeups, self)

    def _parts(self) -> Parts:
        parts = self.post.parts(poll=round(self.world.options.poll * SECOND))
        parts.keeper = SteppedKeeper(self.database, parts.telemetry, self)
        parts.calls = SteppedCalls()
        parts.retention = None  # the checkers read all that has happened
        return parts

    async def run(self) -> None:
        """Work until `stop` is set and what had begun is done."""
        await self.runtime.run(self.stop)
        self.post.hub().close()  # whoever still waits is told

    def ended(self, task: asyncio.Task[Any]) -> None:
        """A task of the process is over."""
        self.tasks.pop(task, None)

    def check_alive(self) -> None:
        """Raise Crash in whatever a dead process still tries to do."""
        if self.dead:
            raise Crash

    def at_statement(self, sql: str) -> None:
        """A statement is about to run: may raise Crash."""
        if self.dead:
            raise Crash
        self.world.at_statement(self, sql)

    def shelf(self) -> Shelf:
        """Where connections lie that dead processes have left."""
        return self.world.shelf

    def die(self, where: str) -> None:
        """Die here: nothing that this process does has any effect from now on."""
        if not self.dead:
            self.dead = True
            self.world.died(self, where)
        raise Crash(where)

    def pause(self) -> float:
        """For how many seconds the process is stopped (SIGSTOP)."""
        return max(0, self.paused_until - self.world.clock.monotonic()) / SECOND if self.paused_until else 0

    def waits(self) -> tuple[float, float]:
        """The waits before and after a transaction, in seconds."""
        return self.world.latency(), self.world.latency()

    def gathers(self) -> float:
        """How long the writer is busy before it begins the next group, in seconds."""
        return self.world.gathers()

    def grouped(self, members: int) -> None:
        """So many members are about to be written in one transaction."""
        self.world.grouped(self, members)

    def _reach(self, dispatch: Dispatch[Message]) -> None:
        self.check_alive()
        refusal = self.world.outages.refusal(dispatch)
        if refusal is not None:
            self.world.note(f"{dispatch.key} of {self.name}: {refusal.reason}")
            self.world.at_send(self, "before")
            raise refusal

    def _happen(self, who: Who, tool: str, name: str, key: str) -> int:
        self.check_alive()
        return self.world.happened(self, who, tool, name, key)

    def _arrive(self, dispatch: Dispatch[Message]) -> None:
        self.check_alive()
        self.world.at_send(self, "before")
        self.world.arrived(self, dispatch)
        self.world.at_send(self, "after")
