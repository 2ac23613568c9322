"""A simulated process: an app with its real loops over its own connections, which may die at any statement."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from sqlalchemy import event

from postroad.engine.app import Postroad
from postroad.engine.leases import Keeper
from postroad.engine.listener import Listener
from postroad.engine.loop import Parts
from postroad.engine.running import Runtime
from postroad.engine.telemetry import Telemetry
from postroad.engine.wakeups import Topic, Wakeups
from postroad.model.clock import SECOND, FakeClock
from postroad.model.dispatches import Alert, Dispatch
from postroad.model.entropy import SeededEntropy
from postroad.store.database import Database, Lock
from postroad.store.executor import Inline, outcome
from postroad.testing.simulation.options import Options
from postroad.testing.simulation.workload import Message, Outside, declare

R = TypeVar("R")
RENEW_EVERY_SECONDS = 1.0
CURRENT: ContextVar["Process | None"] = ContextVar("simulated process", default=None)


class Crash(BaseException):
    """A simulated process has died here. Not an Exception: nothing in the product may catch it and go on."""


class World(Protocol):
    """What a process needs of the world around it."""

    options: Options
    clock: FakeClock
    url: str

    def note(self, what: str) -> None:
        """Write a line of the run's log."""

    def at_statement(self, process: "Process", when: str, sql: str) -> None:
        """A statement of the process is about to run, or has run: may raise Crash."""

    def at_send(self, process: "Process", when: str) -> None:
        """A message is about to arrive, or has arrived: may raise Crash."""

    def latency(self) -> float:
        """How long the database takes to hear, or to answer, in seconds."""

    def arrived(self, process: "Process", dispatch: Dispatch[Message]) -> None:
        """A message has arrived."""

    def tried(self, stream: str, turn: str, attempt: int) -> None:
        """A handler was called."""

    def rang(self, alert: Alert) -> None:
        """An alert has rung."""

    def hint(self, process: "Process", topics: frozenset[Topic]) -> None:
        """The process has committed something that wakes loops."""

    def saw(self, process: "Process", name: str, values: Mapping[str, Any]) -> None:
        """The product's telemetry said something."""

    def died(self, process: "Process", where: str) -> None:
        """The process has died and will be buried."""


class SimulatedDatabase(Database):
    """Everything inline, with the waits of a slow database, and refused once its process is dead."""

    def __init__(self, process: "Process") -> None:
        super().__init__(process.world.url, clock=process.world.clock, executor=Inline())
        self._process = process
        event.listen(self.engine, "connect", self._prepare)
        event.listen(self.engine, "checkin", _let_go)
        event.listen(self.engine, "close", _let_go)
        event.listen(self.engine, "before_cursor_execute", self._before)
        event.listen(self.engine, "after_cursor_execute", self._after)

    async def atransact(
        self,
        fn: Callable[..., R],
        *args: Any,
        lock: Lock | None = None,
        urgent: bool = False,
        **kwargs: Any,
    ) -> R:
        return await self._slowly(lambda: self.transact(fn, *args, lock=lock, urgent=urgent, **kwargs))

    async def aread(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return await self._slowly(lambda: self.read(fn, *args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._process.check_alive()
        return super()._run(*args, **kwargs)

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        self._process.check_alive()
        return super()._read(*args, **kwargs)

    async def _slowly(self, call: Callable[[], R]) -> R:
        """The call's result, after the wait for the database and the wait for its answer."""
        heard, told = self._process.waits()
        answer: Future[R] = Future()
        loop = asyncio.get_running_loop()

        def tell(done: Future[R]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        def run() -> None:
            done = Inline().submit(call)
            if told:
                loop.call_later(told, tell, done)
            else:
                tell(done)

        if heard:
            loop.call_later(heard, run)
        else:
            run()
        return await outcome(answer)

    def _prepare(self, connection: Any, _record: object) -> None:
        # Processes die here, the machine does not: what was written stays written.
        connection.execute("PRAGMA synchronous = OFF")
        # In one thread nobody would ever let go of a lock that somebody waits for.
        connection.execute("PRAGMA busy_timeout = 0")
        connection.create_function("sim_now", 0, self._process.world.clock.wall)

    def _before(self, conn: Any, cursor: Any, sql: str, *_: Any) -> None:
        self._process.world.at_statement(self._process, "before", sql)

    def _after(self, conn: Any, cursor: Any, sql: str, *_: Any) -> None:
        self._process.world.at_statement(self._process, "after", sql)


def _let_go(connection: Any, _record: object) -> None:
    # A process that died has lost its locks at once, not when it is buried, nor when its cursors are collected.
    if connection is not None:
        connection.rollback()


class SteppedKeeper(Keeper):
    """Renews from a task of the one event loop instead of a thread."""

    def __init__(self, database: Database, telemetry: Telemetry, process: "Process") -> None:
        super().__init__(database, telemetry)
        self._process = process
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._renew_on())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _renew_on(self) -> None:
        while True:
            await asyncio.sleep(self._process.pause() or RENEW_EVERY_SECONDS)
            if not self._process.pause():
                self.renew()


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
        self.database = SimulatedDatabase(self)
        self.post = Postroad(world.url)
        outside = Outside(arrive=self._arrive, tried=world.tried, ring=world.rang, alive=lambda: not self.dead)
        declare(self.post, world.options, outside, faxes=faxes)
        self.post._opened = self.database
        self.post.entropy = SeededEntropy(seed)
        self.post.observe(lambda event, values: world.saw(self, event, values))
        self.parts = self._parts()
        self.runtime = Runtime(self.parts, grace=round(world.options.grace * SECOND))
        self.runtime._listener = Hints(self.database, self.parts.wakeups, self)

    def _parts(self) -> Parts:
        parts = self.post.parts(poll=round(self.world.options.poll * SECOND))
        parts.keeper = SteppedKeeper(self.database, parts.telemetry, self)
        return parts

    async def run(self) -> None:
        """Work until `stop` is set and what had begun is done."""
        await self.runtime.run(self.stop)

    def check_alive(self) -> None:
        """Raise Crash in whatever a dead process still tries to do."""
        if self.dead:
            raise Crash

    def die(self, where: str) -> None:
        """Die here: nothing that this process does has any effect from now on."""
        if not self.dead:
            self.dead = True
            self.world.died(self, where)
        raise Crash(where)

    def pause(self) -> float:
        """For how many seconds the process is stopped (SIGSTOP)."""
        return max(0, self.paused_until - self.world.clock.monotonic()) / SECOND

    def waits(self) -> tuple[float, float]:
        """The waits before and after a transaction, in seconds."""
        stopped = self.pause()
        return max(self.world.latency(), stopped), self.world.latency()

    def _arrive(self, dispatch: Dispatch[Message]) -> None:
        self.check_alive()
        self.world.at_send(self, "before")
        self.world.arrived(self, dispatch)
        self.world.at_send(self, "after")
