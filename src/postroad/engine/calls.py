"""Running user code: async functions as tasks, sync ones in threads of their own, each with a deadline."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from postroad.engine.deadlines import Deadlines, DeadlinesOfLoops
from postroad.engine.declarations import is_async
from postroad.model.clock import SECOND
from postroad.model.payload import safe_error

CANCEL_GRACE_SECONDS = 1.0
HANDLER = "postroad-handler"
"""The name of the tasks and the threads in which user code runs."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The function came to its end."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised, whatever it was: SystemExit and KeyboardInterrupt too are a handler's failure."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline passed. `stuck`: it runs on all the same, its result will be refused."""

    stuck: bool


@dataclass(frozen=True, slots=True)
class Aborted:
    """We ended it: its claim was lost, or the process shuts down. `stuck`: it runs on, as with `TimedOut`."""

    why: str
    stuck: bool = False


CallResult = Returned | Raised | TimedOut | Aborted
Done = Callable[[CallResult], None]
Abort = asyncio.Future[str]
P = ParamSpec("P")
R = TypeVar("R")


def contained(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call user code that runs in our own loops and threads.

    What is no Exception, SystemExit and its like, would end these; it comes out as a RuntimeError that names it.
    """
    try:
        return fn(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(safe_error(error)) from error


class Call(Protocol):
    """A call that was started."""

    def abort(self, why: str) -> None:
        """End it, unless it has ended: it is told to stop, and what it still does is refused."""


class Calls(Protocol):
    """How user code is run."""

    @property
    def left(self) -> Sequence[str]:
        """The functions whose calls were ended and run on all the same."""

    def start(
        self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, done: Done, late: Done | None = None
    ) -> Call:
        """Call `fn(argument)`, for `timeout` microseconds at the most.

        `done` gets the result, once, in the loop's thread, and maybe before this returns. `late` gets what the call
        came to by itself after its end was told: always if it was `stuck`, else only if it returned all the same.
        """


async def run_call(calls: Calls, fn: Callable[[Any], Any], argument: Any, *, timeout: int, abort: Abort) -> CallResult:
    """Call `fn(argument)` and wait for its end, for `timeout` microseconds at the most or until `abort` is set."""
    ended: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
    call = calls.start(fn, argument, timeout=timeout, done=partial(_deliver, ended))

    def give_up(told: Abort) -> None:
        call.abort(told.result())

    abort.add_done_callback(give_up)
    try:
        return await ended
    except asyncio.CancelledError:
        call.abort("cancelled")
        raise
    finally:
        abort.remove_done_callback(give_up)


class RealCalls:
    """Async functions as tasks of the running loop, sync ones in daemon threads, which cannot be cancelled."""

    def __init__(self) -> None:
        self._stuck: dict[asyncio.Future[CallResult], str] = {}
        self._deadlines = DeadlinesOfLoops()

    @property
    def stuck(self) -> int:
        """How many calls outlived their deadline and still run."""
        return len(self._stuck)

    @property
    def left(self) -> Sequence[str]:
        """The functions whose calls were ended and run on all the same."""
        return sorted(self._stuck.values())

    def start(
        self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, done: Done, late: Done | None = None
    ) -> Call:
        awaited = is_async(fn)
        future = _as_task(fn, argument) if awaited else _in_thread(fn, argument)
        deadlines = self._deadlines.of(timeout / SECOND)
        return _Call(future, deadlines, done, late or _unheard, cancels=awaited, fn=fn, stuck=self._stuck)


class _Call:
    """A call with its deadline. What it still does after its end changes that end no more."""

    __slots__ = (
        "_cancels", "_deadlines", "_done", "_fn", "_future", "_grace", "_late", "_loop", "_stuck", "_verdict",
    )  # fmt: skip

    def __init__(
        self,
        future: asyncio.Future[CallResult],
        deadlines: Deadlines,
        done: Done,
        late: Done,
        *,
        cancels: bool,
        fn: Callable[[Any], Any],
        stuck: dict[asyncio.Future[CallResult], str],
    ) -> None:
        self._loop = future.get_loop()
        self._future = future
        self._done = done
        self._late = late
        self._cancels = cancels
        self._fn = fn
        self._stuck = stuck
        self._verdict: TimedOut | Aborted | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._deadlines = deadlines
        deadlines.add(self, self._overdue)
        future.add_done_callback(self._ended)

    def abort(self, why: str) -> None:
        if self._verdict is None and not self._future.done():
            self._end(Aborted(why))

    def _ended(self, future: asyncio.Future[CallResult]) -> None:
        self._stop_waiting()
        result = _result(future)
        if future in self._stuck:
            del self._stuck[future]  # its end was told when it did not stop
            self._late(result)
        elif self._verdict is None:
            self._done(result)
        else:
            self._done(self._verdict)
            if isinstance(result, Returned):  # it has swallowed its cancellation
                self._late(result)

    def _overdue(self, due: float) -> None:
        """The deadline is over. If we are late ourselves, the process stood still, and the call with it."""
        if self._verdict is not None:  # it was aborted just now
            return
        if self._loop.time() - due > CANCEL_GRACE_SECONDS:
            self._grace = self._loop.call_later(CANCEL_GRACE_SECONDS, self._end, TimedOut(stuck=False))
        else:
            self._end(TimedOut(stuck=False))

    def _stop_waiting(self) -> None:
        self._deadlines.drop(self)
        if self._grace is not None:
            self._grace.cancel()

    def _end(self, verdict: TimedOut | Aborted) -> None:
        if self._future.done():  # what it came to is about to be told
            return
        self._stop_waiting()
        self._verdict = verdict
        if self._cancels:  # a thread cannot be
            self._future.cancel()
            self._grace = self._loop.call_later(CANCEL_GRACE_SECONDS, self._outlived, verdict)
        else:
            self._outlived(verdict)

    def _outlived(self, verdict: TimedOut | Aborted) -> None:
        if not self._future.done():
            self._stuck[self._future] = _named(self._fn)
            self._done(replace(verdict, stuck=True))


class InlineCalls:
    """Sync functions in the caller's own thread, one after the other, without deadlines: for tests and simulation."""

    @property
    def left(self) -> Sequence[str]:
        """None: nothing is ended here."""
        return ()

    def start(
        self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, done: Done, late: Done | None = None
    ) -> Call:
        if is_async(fn):
            task = asyncio.ensure_future(_guarded(fn, argument))
            task.add_done_callback(lambda ended: done(_result(ended)))
        else:
            done(_called(fn, argument))
        return _Unending()


class _Unending:
    """A call that nobody ends."""

    def abort(self, why: str) -> None:
        pass


async def _guarded(fn: Callable[[Any], Any], argument: Any) -> CallResult:
    try:
        return Returned(await fn(argument))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Raised(error)
    except BaseException as error:
        return Raised(error)


def _as_task(fn: Callable[[Any], Any], argument: Any) -> asyncio.Task[CallResult]:
    return asyncio.get_running_loop().create_task(_guarded(fn, argument), name=HANDLER)


def _named(fn: Callable[[Any], Any]) -> str:
    """A function as its author knows it."""
    said = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"{getattr(fn, '__module__', type(fn).__module__)}.{said}"


def _in_thread(fn: Callable[[Any], Any], argument: Any) -> asyncio.Future[CallResult]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[CallResult] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        result = context.run(_called, fn, argument)
        if not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, future, result)

    try:
        # A daemon: a handler that never returns must not keep the process from ending.
        threading.Thread(target=work, name=HANDLER, daemon=True).start()
    except RuntimeError as error:  # there are as many as the machine allows
        future.set_result(Raised(error))
    return future


def _called(fn: Callable[[Any], Any], argument: Any) -> CallResult:
    try:
        return Returned(fn(argument))
    except BaseException as error:
        return Raised(error)


def _unheard(_: CallResult) -> None:
    pass


def _deliver(future: asyncio.Future[CallResult], result: CallResult) -> None:
    if not future.done():
        future.set_result(result)


def _result(call: asyncio.Future[CallResult]) -> CallResult:
    if call.cancelled():
        return Raised(asyncio.CancelledError())
    return call.result()
