"""The loops of a process together: started, drained, and ended in order."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, TypeVar

from postroad.engine.calls import CANCEL_GRACE_SECONDS, HANDLER
from postroad.engine.crons import Scheduler
from postroad.engine.dispatcher import Dispatcher
from postroad.engine.listener import Listener
from postroad.engine.loop import Loop, Parts
from postroad.engine.pump import Pump
from postroad.engine.telemetry import logger
from postroad.engine.worker import Worker
from postroad.model.clock import SECOND, span
from postroad.model.errors import Refused, Span
from postroad.model.failpoints import failpoint

T = TypeVar("T")
Part = Literal["turns", "sends", "timers"]
PARTS: tuple[Part, ...] = ("turns", "sends", "timers")
GRACE = 25 * SECOND
LINGER_SECONDS = 1.0
_Handler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Drained:
    """What a drain did, and what still waits for its time."""

    __slots__ = (
        "attempted",
        "dead_letter",
        "delivered",
        "expired",
        "retried",
        "stale",
        "timers",
        "turns",
        "waiting",
    )

    def __init__(self, counts: dict[str, int], waiting: int) -> None:
        self.attempted = counts.get("attempted", 0)
        self.delivered = counts.get("delivered", 0)
        self.dead_letter = counts.get("dead_letter", 0)
        self.expired = counts.get("expired", 0)
        self.retried = counts.get("retried", 0)
        self.stale = counts.get("stale", 0)
        self.turns = counts.get("turns", 0)
        self.timers = counts.get("timers", 0)
        self.waiting = waiting

    def __repr__(self) -> str:
        return f"Drained({', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)})"


def build(parts: Parts, only: Sequence[Part] = PARTS, *, pump_interval: Span | None = None) -> list[Loop]:
    """The loops that a process runs. A pump interval over 30 s is refused."""
    interval = None if pump_interval is None else span(pump_interval, "pump_interval")
    loops: list[Loop] = []
    if "turns" in only and parts.registry.crons:
        loops.append(Scheduler(parts, parts.registry.crons))
    if "timers" in only:
        loops.append(Pump(parts, interval=interval))
    if "turns" in only:
        loops.append(Worker(parts))
    if "sends" in only:
        loops.append(Dispatcher(parts))
    return loops


class Runtime:
    """Loops with what they need around them: lease renewal and the listener for other processes' wake-ups."""

    def __init__(
        self,
        parts: Parts,
        only: Sequence[Part] = PARTS,
        *,
        grace: int = GRACE,
        pump_interval: Span | None = None,
    ) -> None:
        self.parts = parts
        self.loops = build(parts, only, pump_interval=pump_interval)
        self._grace = grace
        self._listener = Listener(parts.database, parts.wakeups)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; then claim nothing more, finish what is under way, give back the rest."""
        self.parts.keeper.start()
        self._listener.start()
        try:
            await asyncio.gather(*(loop.run(stop) for loop in self.loops))
            await self._end()
        finally:
            self._listener.close()
            self.parts.keeper.close()

    async def _end(self) -> None:
        failpoint("shutdown.begun")
        finishing = asyncio.ensure_future(self._finish())
        await asyncio.wait({finishing}, timeout=self._grace / SECOND)
        if not finishing.done():
            logger.warning("grace is over: giving back what has not ended")
            for loop in self.loops:
                loop.abandon("shutdown")
            failpoint("shutdown.abandoned")
            await asyncio.wait({finishing}, timeout=max(self._grace / SECOND / 5, 2))
        if finishing.done():
            finishing.result()
            await linger(self.loops)
        else:
            finishing.cancel()
            _tell_left(self.loops)

    async def _finish(self) -> None:
        for loop in self.loops:
            await _ended(loop, loop.finish())


async def linger(loops: Sequence[Loop]) -> None:
    """At the very end, give what was given up and still runs a moment, so that what it comes to is recorded.

    What runs on even then is said in one line: it is left behind, with its thread or its task.
    """
    for loop in loops:
        await _ended(loop, loop.linger(LINGER_SECONDS))
    _tell_left(loops)


def _tell_left(loops: Sequence[Loop]) -> None:
    left = Counter(name for calls in {loop.parts.calls for loop in loops} for name in calls.left)
    if left:
        said = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in sorted(left.items()))
        logger.warning("left behind, since it goes on although it was ended: %s", said)


async def _ended(loop: Loop, ending: Coroutine[Any, Any, None]) -> None:
    """End a loop; one that cannot be, since the database is away, hinders no other."""
    try:
        await ending
    except Exception as error:
        logger.error("%s: not everything could be finished: %s", loop.name, error)


async def drain(loops: Sequence[Loop]) -> None:
    """Step every loop until none finds anything due and nothing is under way."""
    while True:
        busy = False
        for loop in loops:
            busy = bool(await loop.step()) or busy
            await loop.finish()
        if not busy:
            return


def run_bounded(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but what ignores its cancellation is left behind after a second instead of waited for."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_GRACE_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    if others := [_named(task) for task in asyncio.all_tasks(loop) if task.get_name() != HANDLER]:
        logger.warning("left behind, since they ignore their cancellation: tasks of %s", ", ".join(sorted(others)))
    loop.set_exception_handler(partial(_untold, loop.get_exception_handler()))


def _named(task: "asyncio.Task[Any]") -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())


def _untold(handler: "_Handler | None", loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Hand on what a closed loop has to say, but not that a task was left behind: that was said, in words of ours."""
    task = context.get("task")
    if isinstance(task, asyncio.Task) and not task.done():
        return
    if handler is None:
        loop.default_exception_handler(context)
    else:
        handler(loop, context)


class Loops:
    """What `running` returns: the loops run for as long as the block lasts.

    With `with` they run in a thread of their own, with `async with` in the running event loop. No signal handler
    is installed.
    """

    def __init__(
        self, runtime: Callable[[], Runtime], resources: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._build = runtime
        self._resources = resources
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> None:
        runtime = self._build()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._in_thread, args=(runtime, started), name="postroad-loops", daemon=True
        )
        self._thread.start()
        started.wait()
        if self._failure is not None:
            raise self._failure

    def __exit__(self, *error: object) -> None:
        assert self._thread is not None
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None and error[0] is None:
            raise self._failure

    async def __aenter__(self) -> None:
        if self._task is not None:
            raise Refused("These loops run already.")
        runtime = self._build()
        self._stop = asyncio.Event()
        started = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._serve(runtime, self._stop, lambda: started.set_result(None)))
        self._task.add_done_callback(_told)
        await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        assert self._stop is not None
        self._stop.set()
        await self._task

    async def _serve(self, runtime: Runtime, stop: asyncio.Event, started: Callable[[], None]) -> None:
        async with self._resources():
            started()
            await runtime.run(stop)

    def _in_thread(self, runtime: Runtime, started: threading.Event) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            await self._serve(runtime, self._stop, started.set)

        try:
            run_bounded(main())
        except BaseException as error:
            self._failure = error
            logger.error("the loops have ended", exc_info=error)
        finally:
            started.set()


def _told(task: "asyncio.Task[None]") -> None:
    """Loops that die in the middle of a block are told of at once, not only when it is left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the loops have ended", exc_info=error)
