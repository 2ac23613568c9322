"""What a simulated process does itself where a real one has threads: its transactions, calls and renewals."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import event

from postroad.engine.calls import Call, Done, InlineCalls, RealCalls
from postroad.engine.declarations import is_async
from postroad.engine.leases import Keeper
from postroad.engine.telemetry import Telemetry
from postroad.engine.wakeups import Wakeups
from postroad.engine.watching import Hub
from postroad.model.clock import SECOND, Clock
from postroad.store.database import Asked, Database, Lock
from postroad.store.executor import Inline, Lane, outcome
from postroad.store.groups import Item, Member, Verb
from postroad.testing.simulation.connections import Kept, Shelf, SteppedConnection

R = TypeVar("R")
RENEW_EVERY_SECONDS = 1.0
LOOK_SECONDS = 0.25  # how often a stopped process looks whether it may go on
WATCH_SECONDS = 1  # between two looks for what somebody waits for


class Place(Protocol):
    """What the parts of a simulated process need to know of it. Waits are in seconds."""

    def check_alive(self) -> None:
        """Raise Crash in whatever a dead process still tries to do."""

    def at_statement(self, sql: str) -> None:
        """A statement is about to run: may raise Crash."""

    def shelf(self) -> "Shelf":
        """Where connections lie that dead processes have left."""

    def pause(self) -> float:
        """For how long the process is stopped (SIGSTOP)."""

    def waits(self) -> tuple[float, float]:
        """The waits before and after a transaction."""

    def gathers(self) -> float:
        """How long the writer is busy before it begins the next group."""

    def grouped(self, members: int) -> None:
        """So many members are about to be written in one transaction."""


class Onlooker:
    """Whoever is no process: never dies, never waits, and begins nothing."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def check_alive(self) -> None:
        """It always is."""

    def at_statement(self, sql: str) -> None:
        """Nothing happens there."""

    def shelf(self) -> Shelf:
        """Where its connection goes."""
        return self._shelf

    def pause(self) -> float:
        """It is never stopped."""
        return 0

    def waits(self) -> tuple[float, float]:
        """There are none."""
        return 0, 0

    def gathers(self) -> float:
        """It writes nothing."""
        return 0

    def grouped(self, members: int) -> None:
        """It writes nothing."""


class _Executor(Inline):
    """Runs transactions at once, and groups later: what comes meanwhile joins them."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def submit(self, call: Callable[[], R], *, lane: Lane = "plain") -> Future[R]:
        if lane != "group":
            return super().submit(call)
        answer: Future[R] = Future()
        _later(self._place, self._place.gathers(), partial(self._run, call, answer))
        return answer

    def _run(self, call: Callable[[], R], answer: Future[R]) -> None:
        _copy(answer, super().submit(call))


class SteppedDatabase(Database):
    """Transactions in the one thread there is, with the waits of a slow database; groups are a step of their own."""

    def __init__(self, url: str, *, clock: Clock, place: Place) -> None:
        super().__init__(url, clock=clock, executor=_Executor(place))
        self._place = place
        self.writes_several = False
        event.listen(self.engine, "do_connect", self._before_connect)
        event.listen(self.engine, "connect", self._connected)
        event.listen(self.engine, "checkin", _let_go)
        event.listen(self.engine, "close", _let_go)
        self._kept = Kept(self.engine)
        vars(self.engine)["connect"] = self._kept.connect

    def close(self) -> None:
        self._kept.close()
        super().close()

    def transact(
        self, fn: Callable[..., R], *args: Any, lock: Lock | None = None, urgent: bool = False, **kwargs: Any
    ) -> R:  # with no executor in between: this is the thread
        self._refuse_nesting()
        return self._run(Asked(fn, args, kwargs, lock, urgent=urgent))

    def read(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        self._refuse_nesting()
        return self._read(fn, args, kwargs)

    async def atransact(
        self, fn: Callable[..., R], *args: Any, lock: Lock | None = None, urgent: bool = False, **kwargs: Any
    ) -> R:
        return await self._slowly(lambda: self.transact(fn, *args, lock=lock, urgent=urgent, **kwargs))

    async def aread(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return await self._slowly(lambda: self.read(fn, *args, **kwargs))

    async def agroup(self, verb: Verb[Item, R], item: Item) -> R:
        _, told = self._place.waits()
        written: Future[R] = self._join(verb, item)
        answer: Future[R] = Future()
        written.add_done_callback(partial(_tell, answer, told))
        return await outcome(answer)

    def _write_group(self, members: list[Member]) -> list[Member]:
        self.writes_several = len(members) > 1
        if self.writes_several:
            self._place.grouped(len(members))
        try:
            return super()._write_group(members)
        finally:
            self.writes_several = False

    async def _slowly(self, call: Callable[[], R]) -> R:
        """The call's result, after the wait for the database and the wait for its answer."""
        heard, told = self._place.waits()
        if not (heard or told or self._place.pause()):
            try:
                return call()
            finally:
                await self._while_stopped()
        answer: Future[R] = Future()
        _later(self._place, heard, lambda: _tell(answer, told, Inline().submit(call)))
        try:
            return await outcome(answer)
        finally:
            await self._while_stopped()

    async def _while_stopped(self) -> None:
        """An answer is not heard by a process that was stopped meanwhile."""
        await asyncio.sleep(0)
        if self._place.pause():
            going: Future[None] = Future()
            _later(self._place, 0, partial(going.set_result, None))
            await outcome(going)

    def _before_connect(self, _dialect: object, _record: object, _args: object, parameters: dict[str, Any]) -> Any:
        parameters["factory"] = SteppedConnection
        return self._place.shelf().take()

    def _connected(self, connection: Any, _record: object) -> None:
        # Processes die here, the machine does not: what was written stays written.
        connection.execute("PRAGMA synchronous = OFF")
        # In one thread nobody would ever let go of a lock that somebody waits for.
        connection.execute("PRAGMA busy_timeout = 0")
        connection.create_function("sim_now", 0, self.clock.wall)
        connection.of(self._place)


def _let_go(connection: Any, _record: object) -> None:
    # A process that died has lost its locks at once, not when it is buried, nor when its cursors are collected.
    if connection is not None:
        connection.rollback()


def _later(place: Place, wait: float, call: Callable[[], object]) -> None:
    """Call after a wait, and not while the process is stopped."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        stopped = place.pause()
        if stopped:
            loop.call_later(min(stopped, LOOK_SECONDS), run)
        else:
            call()

    loop.call_later(wait, run)


def _tell(answer: Future[R], told: float, done: Future[R]) -> None:
    """Give the answer of what is done, after the wait for it."""
    if told:
        asyncio.get_running_loop().call_later(told, _copy, answer, done)
    else:
        _copy(answer, done)


def _copy(answer: Future[R], done: Future[R]) -> None:
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)


class SteppedCalls(RealCalls):
    """Async functions as tasks, with their deadlines; sync ones at once, since here is no other thread."""

    def start(
        self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, done: Done, late: Done | None = None
    ) -> Call:
        if is_async(fn):
            return super().start(fn, argument, timeout=timeout, done=done, late=late)
        return InlineCalls().start(fn, argument, timeout=timeout, done=done)


class SteppedKeeper(Keeper):
    """Renews from a task of the one event loop instead of a thread."""

    def __init__(self, database: Database, telemetry: Telemetry, place: Place) -> None:
        super().__init__(database, telemetry)
        self._place = place
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._renew_on())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _renew_on(self) -> None:
        while True:
            await asyncio.sleep(self._place.pause() or RENEW_EVERY_SECONDS)
            if not self._place.pause():
                self.renew()


class SteppedHub(Hub):
    """Looks from the tasks of those who wait, for all of them, as rarely as its thread would."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        super().__init__(database, wakeups)
        self._looked = -1

    async def _look_here(self) -> None:
        await asyncio.sleep(WATCH_SECONDS)
        now = self.database.clock.monotonic()
        if now - self._looked >= WATCH_SECONDS * SECOND:
            self._looked = now
            await super()._look_here()
